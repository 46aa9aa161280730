// Results as tables for people and as JSON lines for machines, and how far a measurement is.
#pragma once

#include <fstream>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "safetensors.hpp"
#include "statistics.hpp"

namespace freekv::examples {

/// One JSON object a line: bench, case, metric, value, unit, and what holds for the whole run. Lines are
/// written as they come, to `PATH.part`, which takes PATH's place when it is complete. What holds for a case
/// goes before that, and `more`, of a line alone, before both.
class json_lines {
 public:
  /// `run`: what holds for every line. It and what adds lines throw file_error where they cannot be written.
  json_lines(const std::string& path, nlohmann::ordered_json run);
  void add(const std::string& bench, const std::string& of_case, const std::string& metric, double value,
           const std::string& unit, const nlohmann::ordered_json& more = {});
  /// Three lines: `metric`, `metric`_low and `metric`_high.
  void add(const std::string& bench, const std::string& of_case, const std::string& metric,
           const estimate& value, const std::string& unit, const nlohmann::ordered_json& more = {});
  /// What holds for each line of a case that is added from now on.
  void set_case(const std::string& name, nlohmann::ordered_json its) { cases_[name] = std::move(its); }
  /// Moves the file to its place.
  void finish();

 private:
  std::string path_;
  nlohmann::ordered_json run_;
  std::map<std::string, nlohmann::ordered_json> cases_;
  std::ofstream file_;
};

/// On stderr: one line that is overwritten on a terminal, a line at the start of each piece elsewhere. Noted
/// as well as what the program is at, for the line that a fatal signal leaves.
class progress_line {
 public:
  void operator()(const std::string& what, double done);

 private:
  std::string last_;
};

/// Columns padded to their widest cell; the first is aligned left, the others right.
std::string table(const std::vector<std::vector<std::string>>& rows);

/// `value` with `digits` behind the point.
std::string fixed(double value, int digits);

}  // namespace freekv::examples

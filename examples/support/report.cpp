#include "report.hpp"

#include <unistd.h>
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <iostream>

#include "fatal_signals.hpp"

namespace freekv::examples {

json_lines::json_lines(const std::string& path, nlohmann::ordered_json run)
    : path_(path), run_(std::move(run)), file_(path + ".part") {
  if (!file_) throw file_error("'" + path + ".part' cannot be written; choose another folder with --out");
}

void json_lines::add(const std::string& bench, const std::string& of_case, const std::string& metric,
                     double value, const std::string& unit, const nlohmann::ordered_json& more) {
  nlohmann::ordered_json line{
      {"bench", bench},
      {"case", of_case},
      {"metric", metric},
      {"value", std::isfinite(value) ? nlohmann::ordered_json(value) : nlohmann::ordered_json(nullptr)},
      {"unit", unit}};
  line.update(run_);
  if (const auto its = cases_.find(of_case); its != cases_.end()) line.update(its->second);
  if (!more.is_null()) line.update(more);
  file_ << line.dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)
        << std::endl;  // generated text may end in half a character
  if (!file_)
    throw file_error("'" + path_ + ".part' cannot be written, as on a full disk; it has the lines before '" +
                     metric + "' of " + of_case);
}

void json_lines::add(const std::string& bench, const std::string& of_case, const std::string& metric,
                     const estimate& value, const std::string& unit, const nlohmann::ordered_json& more) {
  add(bench, of_case, metric, value.value, unit, more);
  add(bench, of_case, metric + "_low", value.low, unit, more);
  add(bench, of_case, metric + "_high", value.high, unit, more);
}

void json_lines::finish() {
  file_.close();
  if (!file_ || std::rename((path_ + ".part").c_str(), path_.c_str()) != 0)
    throw file_error("'" + path_ + "' cannot be written; its lines are in '" + path_ + ".part'");
}

void progress_line::operator()(const std::string& what, double done) {
  note_detail(what + ", " + std::to_string(static_cast<int>(100 * done)) + " % done");
  if (isatty(STDERR_FILENO) != 0) {
    std::cerr << "\r\033[K" << what << "  " << static_cast<int>(100 * done) << " %" << (done >= 1 ? "\n" : "")
              << std::flush;
  } else if (what != last_) {
    std::cerr << what << " ..." << std::endl;
    last_ = what;
  }
}

std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<std::size_t> widths;
  for (const auto& row : rows) {
    widths.resize(std::max(widths.size(), row.size()));
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) {
      const std::string space(widths[i] - row[i].size(), ' ');
      text += i == 0 ? row[i] + space : "  " + space + row[i];
    }
    text += "\n";
  }
  return text;
}

std::string fixed(double value, int digits) {
  char text[64];
  std::snprintf(text, sizeof text, "%.*f", digits, value);
  return text;
}

}  // namespace freekv::examples

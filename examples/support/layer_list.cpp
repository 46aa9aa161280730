#include "layer_list.hpp"

#include <algorithm>
#include <cmath>
#include <freekv/core/size.hpp>
#include <sstream>
#include <stdexcept>

#include "cited.hpp"
#include "safetensors.hpp"
#include "text_file.hpp"

namespace freekv::examples {
namespace {

/// The number that a word is; nothing for "-". `is_one` is false where it is neither.
template <class Number>
std::optional<Number> number_of(const std::string& word, bool& is_one) {
  std::istringstream in(word);
  Number number{};
  is_one = word == "-" || (in >> number && in.peek() == std::istringstream::traits_type::eof());
  if (word == "-" || !is_one) return std::nullopt;
  return number;
}

/// What each unit above `least` saves, to `most`: slopes of the lower convex envelope, which never rise.
std::vector<double> savings_of(std::span<const double> loss, int least, int most) {
  std::vector<double> savings;
  for (int at = least; at < most;) {
    int end = at + 1;
    const auto slope = [&](int to) { return (loss[to_size(at)] - loss[to_size(to)]) / (to - at); };
    for (int to = at + 2; to <= most; ++to)
      if (slope(to) > slope(end)) end = to;
    savings.insert(savings.end(), to_size(end - at), slope(end));
    at = end;
  }
  return savings;
}

}  // namespace

std::vector<layer_values> read_layer_list(std::istream& in, const std::string& name, int layers) {
  std::vector<layer_values> all(to_size(layers));
  std::vector<bool> listed(to_size(layers));
  std::string line;
  for (int number = 1; std::getline(in, line); ++number) {
    const auto fail = [&](const std::string& what) {
      throw file_error(cited_path(name) + ", line " + std::to_string(number) + ": " + what);
    };
    std::istringstream of_line(line.substr(0, line.find('#')));
    std::vector<std::string> words;
    for (std::string word; of_line >> word;) words.push_back(word);
    if (words.empty()) continue;
    words.resize(std::max<std::size_t>(words.size(), 4), "?");
    bool is_layer = false, has_tokens = false, has_tau = false, has_delta = false;
    const auto layer = number_of<int>(words[0], is_layer);
    const layer_values values{number_of<int>(words[1], has_tokens), number_of<float>(words[2], has_tau),
                              number_of<float>(words[3], has_delta)};
    if (words.size() != 4 || !layer || !has_tokens || !has_tau || !has_delta)
      fail("a line is \"layer tokens tau delta\", such as \"3 544 - 0.1\", - for what the layer has not");
    if (*layer < 0 || *layer >= layers)
      fail("layer " + std::to_string(*layer) + " is none of " + std::to_string(layers) + " layers");
    if (listed[to_size(*layer)]) fail("layer " + std::to_string(*layer) + " is listed twice");
    if (values.selected_tokens && *values.selected_tokens < 1)
      fail("a layer selects at least a token, not " + std::to_string(*values.selected_tokens));
    if (values.tau && std::abs(*values.tau) > 1)
      fail("tau is a cosine, from -1 to 1, not " + cited(words[2]));
    if (values.delta && (*values.delta < 0 || *values.delta > 1))
      fail("delta is a share, from 0 to 1, not " + cited(words[3]));
    listed[to_size(*layer)] = true;
    all[to_size(*layer)] = values;
  }
  if (in.bad()) throw file_error(cited_path(name) + " cannot be read");
  return all;
}

std::vector<layer_values> read_layer_list(const std::filesystem::path& path, int layers) {
  std::istringstream in(read_text_file(path, "check its name"));
  return read_layer_list(in, path.string(), layers);
}

std::vector<int> share_units(std::span<const std::vector<double>> losses, int total, int least, int most) {
  const int layers = static_cast<int>(losses.size());
  if (least < 0 || least > most || total < least * layers || total > most * layers)
    throw std::invalid_argument("share_units: " + std::to_string(total) + " units are not from " +
                                std::to_string(least) + " to " + std::to_string(most) + " for each of " +
                                std::to_string(layers) + " layers");
  std::vector<int> units(losses.size(), least);
  std::vector<std::vector<double>> savings;
  for (const auto& loss : losses) {
    if (loss.size() <= to_size(most))
      throw std::invalid_argument("share_units: losses with up to " + std::to_string(most) +
                                  " units are asked for, and " + std::to_string(loss.size()) + " are there");
    if (!std::all_of(loss.begin(), loss.end(), [](double x) { return std::isfinite(x); }))
      throw std::invalid_argument("share_units: a loss is not finite");
    savings.push_back(savings_of(loss, least, most));
  }
  for (int left = total - least * layers; left > 0; --left) {
    int best = -1;
    const auto saves = [&](int layer) {
      return savings[to_size(layer)][to_size(units[to_size(layer)] - least)];
    };
    for (int layer = 0; layer < layers; ++layer)
      if (units[to_size(layer)] < most && (best < 0 || saves(layer) > saves(best))) best = layer;
    ++units[to_size(best)];
  }
  return units;
}

std::vector<int> halfway(std::vector<int> units, int even) {
  const auto between = std::count_if(units.begin(), units.end(), [&](int n) { return (n - even) % 2 != 0; });
  int taken = 0;
  for (int& n : units) {
    const int twice = n + even;
    n = twice / 2 + (twice % 2 != 0 && taken++ < between / 2 ? 1 : 0);
  }
  return units;
}

}  // namespace freekv::examples

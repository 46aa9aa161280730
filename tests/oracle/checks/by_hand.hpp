// What the checks of the reference share.
#pragma once

#include <catch2/catch.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <span>
#include <vector>

#include "../oracle.hpp"

namespace {

using ints = std::vector<int>;
using floats = std::vector<float>;
using doubles = std::vector<double>;

constexpr float float_inf = std::numeric_limits<float>::infinity();
constexpr float float_nan = std::numeric_limits<float>::quiet_NaN();

/// Rows of `width` elements, as the pieces take them.
std::vector<std::span<const float>> rows_of(const floats& data, int width) {
  std::vector<std::span<const float>> rows;
  for (int row = 0; row * width < static_cast<int>(data.size()); ++row)
    rows.push_back(oracle::row_of(data, row, width));
  return rows;
}

floats random_floats(std::mt19937& generator, int count) {
  std::normal_distribution<float> normal;
  floats data;
  for (int i = 0; i < count; ++i) data.push_back(normal(generator));
  return data;
}

Approx near(double value) { return Approx(value).epsilon(0.0).margin(1e-6); }

/// One head of dimension 1, pages and window of 2, no sink, one selected page.
oracle::settings tiny() { return {.page = 2, .window = 2, .selected_units = 1, .scale = 1.0, .tau = 0.5}; }

}  // namespace

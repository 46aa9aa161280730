#include <unistd.h>
#include <freekv/backend/host/thread_pool.hpp>
#include <freekv/core/size.hpp>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <fstream>
#include <memory>
#include <random>
#include <thread>

#include "measure.hpp"

namespace freekv::bench {

namespace {

double seconds_of(const std::function<void(int)>& body, int call) {
  const auto start = std::chrono::steady_clock::now();
  body(call);
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

/// Eight sums of words: what a loop over memory does at most.
std::uint64_t sum_of(const std::byte* data, std::size_t bytes) {
  std::uint64_t sums[8] = {};
  const auto* words = reinterpret_cast<const std::uint64_t*>(data);
  for (std::size_t i = 0; i + 8 <= bytes / 8; i += 8)
    for (std::size_t lane = 0; lane < 8; ++lane) sums[lane] += words[i + lane];
  std::uint64_t sum = 0;
  for (const std::uint64_t s : sums) sum += s;
  return sum;
}

}  // namespace

machine this_machine() {
  machine m;
  m.cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  m.memory = to_size(sysconf(_SC_PHYS_PAGES)) * to_size(sysconf(_SC_PAGE_SIZE));
  std::ifstream info("/proc/cpuinfo");
  for (std::string line; std::getline(info, line) && m.processor.empty();)
    if (line.starts_with("model name")) m.processor = line.substr(line.find(':') + 2);
  for (const char* index : {"index3", "index2"}) {
    std::ifstream size(std::string("/sys/devices/system/cpu/cpu0/cache/") + index + "/size");
    std::size_t kilobytes = 0;
    if (size >> kilobytes) {
      m.last_level_cache = kilobytes << 10;
      break;
    }
  }
  if (m.last_level_cache == 0) m.last_level_cache = std::size_t{32} << 20;
  return m;
}

double median(std::vector<double> all) {
  std::nth_element(all.begin(), all.begin() + static_cast<std::ptrdiff_t>(all.size() / 2), all.end());
  return all[all.size() / 2];
}

std::vector<double> seconds_in_turns(int rounds, std::span<const std::function<void(int)>> bodies) {
  std::vector<std::vector<double>> seconds(bodies.size());
  for (std::size_t i = 0; i < bodies.size(); ++i) bodies[i](0);  // pages are mapped, threads started
  for (int round = 0; round < rounds; ++round)
    for (std::size_t n = 0; n < bodies.size(); ++n) {
      const std::size_t i = round % 2 == 0 ? n : bodies.size() - 1 - n;
      seconds[i].push_back(seconds_of(bodies[i], round + 1));
    }
  std::vector<double> medians;
  for (const auto& all : seconds) medians.push_back(median(all));
  return medians;
}

void read_all(std::span<const std::byte> bytes, int threads) {
  static std::atomic<std::uint64_t> kept;          // so that the sums are made
  static std::unique_ptr<host::thread_pool> pool;  // whose threads stand by, as a backend's do
  if (pool == nullptr || pool->size() != threads) pool = std::make_unique<host::thread_pool>(threads);
  const std::size_t part = bytes.size() / to_size(threads) / 64 * 64;
  pool->run(threads, threads - 1, [&](int i, int) { kept = sum_of(bytes.data() + to_size(i) * part, part); });
}

fast_normals::fast_normals(std::uint64_t seed) : table_(4096), state_(seed * 0x9e3779b97f4a7c15ull + 1) {
  std::mt19937_64 engine(seed);
  std::normal_distribution<float> normal;
  for (float& x : table_) x = normal(engine);
}

void context::ratio(const std::string& bench, const std::string& of_case, const std::string& metric,
                    double value, double target, bool at_most) {
  number(bench, of_case, metric, value, "ratio");
  const bool met = at_most ? value <= target : value >= target;
  table.push_back({bench + ", " + of_case, metric, examples::fixed(value, 3),
                   target == 0 ? "" : (at_most ? "<= " : ">= ") + examples::fixed(target, 3),
                   target == 0 ? ""
                   : met       ? "met"
                               : "missed"});
}

void context::number(const std::string& bench, const std::string& of_case, const std::string& metric,
                     double value, const std::string& unit) {
  lines.add(bench, of_case, metric, value, unit, {{"threads", threads}});
}

}  // namespace freekv::bench

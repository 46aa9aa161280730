// Times in turns, limits, and where results go.
#pragma once

#include <cstddef>
#include <cstdint>
#include <freekv/backend/host/isa.hpp>
#include <functional>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "report.hpp"

namespace freekv::bench {

using namespace freekv::detail;

/// What holds for a run.
struct machine {
  std::string processor;
  std::size_t last_level_cache = 0;  ///< bytes
  int cores = 1;
  std::size_t memory = 0;  ///< bytes
};
machine this_machine();

/// The median; of an even number the larger of the middle two.
double median(std::vector<double> all);

/// The seconds of each body: medians of `rounds`, in which all run in turns, forwards and backwards. A body
/// is called with the number of its call.
std::vector<double> seconds_in_turns(int rounds, std::span<const std::function<void(int)>> bodies);

/// Reads all of `bytes` with `threads` threads: the limit of what only reads.
void read_all(std::span<const std::byte> bytes, int threads);

/// Normally distributed numbers, fast: a table in random order.
class fast_normals {
 public:
  explicit fast_normals(std::uint64_t seed);
  float next() {
    state_ ^= state_ << 13;
    state_ ^= state_ >> 7;
    state_ ^= state_ << 17;
    return table_[state_ >> 52];
  }

 private:
  std::vector<float> table_;  // (4096)
  std::uint64_t state_;
};

/// What a bench is told and what it tells.
struct context {
  machine on;
  int threads = 1;
  host::isa instructions = host::best_isa();
  int rounds = 15;
  bool smoke = false;  ///< sizes of seconds, whose figures mean nothing
  std::string only;    ///< cases whose names hold this
  examples::json_lines& lines;
  std::vector<std::vector<std::string>>& table;  ///< case, figure, target
  std::map<std::string, double>& kept;           ///< figures that later ones are compared with, by name

  /// A figure over its limit or peer, and what it should be at least (or, with `at_most`, at most).
  void ratio(const std::string& bench, const std::string& of_case, const std::string& metric, double value,
             double target = 0, bool at_most = false);
  /// Other numbers, for machines alone.
  void number(const std::string& bench, const std::string& of_case, const std::string& metric, double value,
              const std::string& unit);
  /// Whether a case is to be measured; says so.
  bool begins(const std::string& bench, const std::string& of_case) const {
    if ((bench + ", " + of_case).find(only) == std::string::npos) return false;
    examples::progress_line()(bench + ", " + of_case, 0);
    return true;
  }
};

// The benches.
void bench_scoring(context& c);
void bench_recall(context& c);
void bench_steps(context& c);
/// How many boxes around the keys of several pages have a bound below the score of the last page that is
/// selected, as shares of all, summed over selections.
struct ruled_out {
  struct sizes {
    int head_dim = 0, group = 0, pages_of_box = 0, selected = 0;
  };
  double mean_score = 0, mean_softmax = 0;
  int selections = 0;
  /// `keys`: (tokens, head_dim) of one KV head; `queries`: (selections, group, head_dim).
  void add(std::span<const float> keys, std::span<const float> queries, const sizes& of);
};
void report_ruled_out(context& c, const std::string& of_case, const ruled_out& all);
void bench_two_levels(context& c);
/// `model`: a GGUF file; `texts`: files whose tokens it is fed; `folder`: where a file of some hundred MB may
/// lie for a while.
void bench_decoding(context& c, const std::string& model, std::span<const std::string> texts,
                    const std::string& folder);

/// llama.cpp's attention of one token on the CPU: f16 or bf16 keys and values, (kv_heads, tokens, head_dim).
class flash_attention {
 public:
  flash_attention(int query_heads, int kv_heads, int head_dim, int tokens, int threads, bool bf16,
                  fast_normals& random);
  ~flash_attention();
  flash_attention(const flash_attention&) = delete;
  flash_attention& operator=(const flash_attention&) = delete;
  void run();

 private:
  struct state;
  state* state_;
};

}  // namespace freekv::bench

// Keys by product quantisation, relative to their unit's quantised mean. Ours.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <freekv/core/size.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/policies/mean_summaries.hpp>
#include <type_traits>

namespace freekv {

/// One product quantiser in a subspace: a vector is `codes` numbers of 8 bits, each the nearest of 256
/// centroids to `dims` of its coefficients.
struct codebook {
  static constexpr int centroids_per_code = 256;
  static constexpr int most_dims = 256;

  const float* offset = nullptr;     ///< (head_dim), taken off first
  const float* rows = nullptr;       ///< (codes * dims, head_dim), orthonormal
  const float* centroids = nullptr;  ///< (codes, dims, 256)
  int codes = 0;
  int dims = 0;
  int head_dim = 0;

  FREEKV_HD static constexpr std::size_t floats(int codes, int dims, int head_dim) {
    return to_size(head_dim) * to_size(codes * dims + 1) + to_size(codes * dims) * centroids_per_code;
  }
  FREEKV_HD static constexpr codebook at(const float* data, int codes, int dims, int head_dim) {
    const float* rows = data + head_dim;
    return {data, rows, rows + codes * dims * head_dim, codes, dims, head_dim};
  }

  /// The nearest centroid to `x` (dims) among the first `count` of code `nth`; of equally near ones the
  /// first.
  template <team T>
  FREEKV_HD int nearest(T team, int nth, const float* x, int count) const {
    using pack = typename T::pack;
    const float* of_code = centroids + nth * dims * centroids_per_code;
    float lanes[T::width];
    for (int i = 0; i < T::width; ++i) lanes[i] = static_cast<float>(i);
    pack least(infinity), where(0.0f), index = team.load(lanes);
    for (int c = 0; c < centroids_per_code;
         c += T::width, index = index + pack(static_cast<float>(T::width))) {
      pack distance(0.0f);
      for (int d = 0; d < dims; ++d) {
        const pack difference = team.load(of_code + d * centroids_per_code + c) - pack(x[d]);
        distance = distance + difference * difference;
      }
      if (c + T::width > count) {
        const pack first_unused(static_cast<float>(count) - 0.5f);
        distance = team.select_greater(index, first_unused, pack(infinity), distance);
      }
      where = team.select_greater(least, distance, index, where);
      least = team.select_greater(least, distance, distance, least);
    }
    const pack zero(0.0f);
    const float smallest = -team.max(zero - least);
    const pack there = team.select_greater(least, pack(smallest), pack(infinity), where);
    return static_cast<int>(-team.max(zero - there));
  }

  /// Coefficients `rows * (vector - offset)`, (codes * dims).
  template <team T>
  FREEKV_HD void project(T team, const float* vector, float* coefficients) const {
    for (int r = 0; r < codes * dims; ++r) {
      typename T::pack product(0.0f);
      for (int i = 0; i < head_dim; i += T::width)
        product =
            product + team.load(rows + r * head_dim + i) * (team.load(vector + i) - team.load(offset + i));
      coefficients[r] = team.sum(product);
    }
  }

  /// Products of the query's coefficients with all centroids of each code: (codes, 256).
  template <team T>
  FREEKV_HD void tabulate(T team, const float* query, float* table) const {
    for (int nth = 0; nth < codes; ++nth)
      for (int d = 0; d < dims; ++d) {
        const int r = nth * dims + d;
        const typename T::pack q(detail::inner_product(team, rows + r * head_dim, query, head_dim));
        const float* of_dim = centroids + r * centroids_per_code;
        float* row = table + nth * centroids_per_code;
        for (int c = 0; c < centroids_per_code; c += T::width) {
          const auto product = q * team.load(of_dim + c);
          team.store(row + c, d == 0 ? product : team.load(row + c) + product);
        }
      }
  }

  /// Products of up to four query heads side by side: (codes, 256, 4).
  template <team_of_halves T>
  void tabulate_four(T team, const group_query& queries, float* table) const {
    using pack = typename T::pack;
    constexpr int packs = 2;  // a broadcast coefficient is used as often
    for (int nth = 0; nth < codes; ++nth) {
      float of_query[most_dims][4];
      for (int d = 0; d < dims; ++d)
        for (int g = 0; g < 4; ++g)
          of_query[d][g] = g >= queries.group
                               ? 0.0f
                               : detail::inner_product(team, rows + (nth * dims + d) * head_dim,
                                                       queries.head(g), head_dim);
      const float* const of_code = centroids + nth * dims * centroids_per_code;
      for (int c = 0; c < centroids_per_code; c += packs * T::width) {
        pack products[packs][4];
        FREEKV_UNROLL
        for (int i = 0; i < packs * 4; ++i) products[i / 4][i % 4] = pack(0.0f);
        for (int d = 0; d < dims; ++d) {
          const float* const of_dim = of_code + d * centroids_per_code + c;
          team.prefetch(of_dim + dims * centroids_per_code);  // the next code's, or what lies behind all
          FREEKV_UNROLL
          for (int i = 0; i < packs; ++i) {
            const pack of_pack = team.load(of_dim + i * T::width);
            FREEKV_UNROLL
            for (int g = 0; g < 4; ++g) products[i][g] = products[i][g] + pack(of_query[d][g]) * of_pack;
          }
        }
        FREEKV_UNROLL
        for (int i = 0; i < packs; ++i)
          team.store_by_four(table + (nth * centroids_per_code + c + i * T::width) * 4, products[i]);
      }
    }
  }
};

/// The codebooks of all layers and KV heads, as data: for each (layer, head) that of unit means, then that of
/// tokens, each its offset, rows and centroids as `codebook` has them, float32, in memory that the backend
/// can read and that outlives its use. They are learnt from the keys of a prompt or a calibration text. The
/// 256th centroid of a mean's first code is never used.
struct key_codebooks {
  const float* data = nullptr;
  int layers = 0;
  int kv_heads = 0;
  int head_dim = 0;
  int mean_codes = 0, mean_dims = 0;
  int codes = 0, dims = 0;

  FREEKV_HD constexpr std::size_t floats_per_head() const {
    return codebook::floats(mean_codes, mean_dims, head_dim) + codebook::floats(codes, dims, head_dim);
  }
  constexpr std::size_t bytes() const {
    return to_size(layers * kv_heads) * floats_per_head() * sizeof(float);
  }
  FREEKV_HD constexpr codebook mean(int layer, int head) const {
    return codebook::at(data + to_size(layer * kv_heads + head) * floats_per_head(), mean_codes, mean_dims,
                        head_dim);
  }
  FREEKV_HD constexpr codebook token(int layer, int head) const {
    return codebook::at(mean(layer, head).offset + codebook::floats(mean_codes, mean_dims, head_dim), codes,
                        dims, head_dim);
  }
};

/// The unit's mean key in `MeanCodes` bytes, and every token's difference from that mean as decoded in
/// `Codes` bytes. The score is `ln sum_t exp(scale * <q, k_t>)` of the decoded keys up to terms that all
/// units share: the unit's log-mass, by table lookups. `MeanCodes + Codes * p` bytes, without scales. A unit
/// with a NaN or infinite key is marked by the code that means do not use, and scores NaN.
template <int Codes = 6, int MeanCodes = 8>
struct key_codes {
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::at, hook::bytes, hook::data, hook::encode, hook::four_heads, hook::mass_term,
                          hook::prepare, hook::query_width, hook::validate, hook::values>;
  static constexpr std::string_view name = "key_codes";
  count_of<Codes> codes{};
  count_of<MeanCodes> mean_codes{};
  key_codebooks books{};

  // Numbers: the codes, then what `summarise` works with.
  FREEKV_HD constexpr int width(kv_extent unit) const {
    return mean_codes + codes * unit.tokens + 3 * unit.head_dim;
  }
  FREEKV_HD constexpr int query_width(int) const {
    return (mean_codes + codes) * codebook::centroids_per_code;
  }
  template <class Key>
  FREEKV_HD constexpr std::size_t bytes(kv_extent unit) const {
    return to_size(mean_codes + codes * unit.tokens);
  }

  template <class Visit>
  void data(const Visit& visit) const {
    visit(books.data, books.bytes());
  }
  std::string values() const { return std::to_string(int{codes}) + ", " + std::to_string(int{mean_codes}); }
  void validate(const summary_setting& s) const {
    const auto text = [](int n) { return std::to_string(n); };
    if (codes < 1 || mean_codes < 1)
      throw settings_error("key_codes: " + text(codes) + " codes a token and " + text(mean_codes) +
                           " a mean; give 1 or more of each");
    if (s.unit.tokens % 2 != 0)
      throw settings_error("key_codes: two tokens are looked up at a time, and a unit has " +
                           text(s.unit.tokens) + "; choose an even number");
    if (books.data == nullptr)
      throw settings_error(
          "key_codes needs its codebooks as data, `books`: learn them from the prompt's keys or a text, as "
          "examples/support/codebooks.hpp does");
    if (books.codes != codes || books.mean_codes != mean_codes || books.head_dim != s.unit.head_dim ||
        books.layers < s.layers || books.kv_heads != s.kv_heads || books.dims > books.head_dim / codes ||
        books.mean_dims > books.head_dim / mean_codes)
      throw settings_error("key_codes: the codebooks have " + text(books.layers) + " layers of " +
                           text(books.kv_heads) + " heads, " + text(books.codes) + " codes a token and " +
                           text(books.mean_codes) + " a mean, head_dim " + text(books.head_dim) +
                           "; needed are " + text(s.layers) + " layers of " + text(s.kv_heads) + " heads, " +
                           text(codes) + " and " + text(mean_codes) + " codes, head_dim " +
                           text(s.unit.head_dim));
    if (books.dims < 1 || books.mean_dims < 1)
      throw settings_error("key_codes: the codebooks have " + text(books.dims) + " dimensions a code and " +
                           text(books.mean_dims) + " a mean's code; give 1 or more of each");
  }

  /// The policy for one head.
  struct head_policy;
  FREEKV_HD constexpr head_policy at(int layer, int head) const {
    return {*this, books.mean(layer, head), books.token(layer, head)};
  }
};

template <int Codes, int MeanCodes>
struct key_codes<Codes, MeanCodes>::head_policy {
  key_codes policy;
  codebook mean, token;
  static constexpr float not_finite = 255.0f;  ///< as the first code of a mean
  static constexpr int row_of_four = codebook::centroids_per_code * 4;

  FREEKV_HD constexpr int width(kv_extent unit) const { return policy.width(unit); }
  FREEKV_HD constexpr int query_width(int head_dim) const { return policy.query_width(head_dim); }
  template <class Key>
  FREEKV_HD constexpr std::size_t bytes(kv_extent unit) const {
    return policy.template bytes<Key>(unit);
  }

  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    const int d = keys.unit.head_dim, tokens = keys.unit.tokens;
    float* of_token = numbers + mean.codes;  // (codes, tokens)
    float* decoded = of_token + token.codes * tokens;
    float* difference = decoded + d;
    float* coefficients = difference + d;

    typename T::pack zero_if_finite(0.0f);
    for (int i = 0; i < tokens * d; i += T::width)
      zero_if_finite = zero_if_finite + team.load(keys.data + i) * typename T::pack(0.0f);
    if (team.sum(zero_if_finite) != 0.0f) {
      for (int i = 0; i < mean.codes + token.codes * tokens; ++i) numbers[i] = not_finite;
      return;
    }

    detail::mean_of_keys(team, keys, 0, tokens, decoded);
    team.sync();
    mean.project(team, decoded, coefficients);
    team.sync();
    for (int nth = 0; nth < mean.codes; ++nth)
      numbers[nth] = static_cast<float>(mean.nearest(team, nth, coefficients + nth * mean.dims,
                                                     codebook::centroids_per_code - (nth == 0 ? 1 : 0)));
    team.sync();
    decode_mean(team, numbers, decoded);
    team.sync();
    for (int t = 0; t < tokens; ++t) {
      for (int i = 0; i < d; i += T::width)
        team.store(difference + i, team.load(keys.row(t) + i) - team.load(decoded + i));
      team.sync();
      token.project(team, difference, coefficients);
      team.sync();
      for (int nth = 0; nth < token.codes; ++nth)
        of_token[nth * tokens + t] = static_cast<float>(
            token.nearest(team, nth, coefficients + nth * token.dims, codebook::centroids_per_code));
      team.sync();
    }
  }

  /// Products of the query with all centroids: of means (mean codes, 256), then of tokens (codes, 256).
  template <team T>
  FREEKV_HD void prepare(T team, const group_query& query, float* prepared) const {
    mean.tabulate(team, query.data, prepared);
    token.tabulate(team, query.data, prepared + mean.codes * codebook::centroids_per_code);
    team.sync();
    prepared[static_cast<int>(not_finite)] = NAN;
  }

  /// The product with what is taken off means and tokens before they are coded.
  template <team T>
  FREEKV_HD float mass_term(T team, const group_query& query) const {
    return rounded_sum(detail::inner_product(team, mean.offset, query.data, query.head_dim),
                       detail::inner_product(team, token.offset, query.data, query.head_dim));
  }

  template <team T>
  FREEKV_HD float score(T team, const unit_query& query, const std::byte* stored) const {
    constexpr int rows = codebook::centroids_per_code;
    const auto* code = reinterpret_cast<const std::uint8_t*>(stored);
    const float* table = query.data;
    float of_mean = 0.0f;
    for (int nth = 0; nth < mean.codes; ++nth, table += rows) of_mean += table[code[nth]];
    code += mean.codes;
    const typename T::pack scale(query.scale), base(query.scale * of_mean);
    const int tokens = query.unit.tokens;
    log_sum_exp log_sum;
    int t = 0;
    for (; t + T::width <= tokens; t += T::width) {
      auto sum = team.lookup(table, code + t);
      for (int nth = 1; nth < token.codes; ++nth)
        sum = sum + team.lookup(table + nth * rows, code + nth * tokens + t);
      sum = base + scale * sum;
      log_sum.add(team, &sum, 1);
    }
    for (; t < tokens; ++t) {
      float sum = table[code[t]];
      for (int nth = 1; nth < token.codes; ++nth)
        sum = rounded_sum(sum, table[nth * rows + code[nth * tokens + t]]);
      log_sum.add(rounded_sum(query.scale * of_mean, query.scale * sum));
    }
    return log_sum.value();
  }

  /// Four query heads' products lie side by side, so that a token's code is looked up once for all of them:
  /// products of means (mean codes, 256, 4), then of tokens (codes, 256, 4).
  template <team_of_halves T>
  void prepare_four(T team, const group_query& queries, float* prepared) const {
    mean.tabulate_four(team, queries, prepared);
    token.tabulate_four(team, queries, prepared + mean.codes * row_of_four);
    for (int g = 0; g < 4; ++g) prepared[static_cast<int>(not_finite) * 4 + g] = NAN;
  }
  /// Lanes are four heads of two units. Of all small units first what means contribute, so that the nearest
  /// cache holds either table while it is read; then of a few units all tokens' products, their exponentials,
  /// last the logarithms of sums, so that none waits for another's. Log-masses of finite numbers; what is
  /// not, or NaN, is put right in the end.
  template <team_of_halves T>
  void score_four(T team, const unit_query& query, const stored_summaries& units, float* scores) const {
    using pack = typename T::pack;
    using wide = typename detail::wide_team<T>::type;
    constexpr int room = T::width * 256, most_pairs = 8;  // products of two of the largest units
    alignas(64) float products[room];
    float most[most_pairs * T::width], sum[most_pairs * T::width];
    const auto two = [&](int j) { return two_units{units.at(j), units.at(j + 1 < units.count ? j + 1 : j)}; };
    const int of_pair = T::width * query.unit.tokens;
    const int at_once = 2 * std::clamp(512 / of_pair, 1, most_pairs);
    // Small ones share cache lines; of others each line is read once.
    const int means_at_once = units.bytes < 64 ? units.count : at_once;
    const pack largest_float(std::numeric_limits<float>::max());
    for (int first = 0; first < units.count; first += at_once) {
      for (std::size_t i = 0; i < to_size(at_once) * units.bytes; i += 64)  // what comes next, if anything
        team.prefetch(units.at(first + at_once) + i);
      const int means_end = std::min(first + means_at_once, units.count);
      for (int j = first; first % means_at_once == 0 && j < means_end; j += 2)
        team.store(scores + 4 * j, pack(query.scale) * of_means(team, query, two(j)));
      const int count = std::min(units.count - first, at_once);
      for (int j = 0; j < count; j += 2)
        team.store(most + 4 * j,
                   multiply_four(team, query, two(first + j), team.load(scores + 4 * (first + j)),
                                 products + j / 2 * of_pair));
      for (int j = 0; j < count; j += 2) {
        const float* const x = products + j / 2 * of_pair;
        const auto base = wide{}.repeat(team.load(most + 4 * j));
        typename wide::pack total(0.0f);
        for (int i = 0; i < of_pair; i += wide::width)
          total = total + wide{}.bounded_exp(wide{}.load(x + i) - base);
        team.store(sum + 4 * j, wide{}.fold(total));
      }
      for (int j = 0; j < count; j += 2) {
        const pack m = team.load(most + 4 * j);
        team.store(scores + 4 * (first + j),
                   team.select_greater(m, largest_float, m, m + team.log(team.load(sum + 4 * j))));
      }
    }
  }

  template <class Key, team T>
  FREEKV_HD void encode(T team, kv_extent unit, const float* numbers, std::byte* out) const {
    auto* bytes_out = reinterpret_cast<std::uint8_t*>(out);
    for (int i = team.lane(); i < mean.codes + token.codes * unit.tokens; i += team.lanes())
      bytes_out[i] = static_cast<std::uint8_t>(numbers[i]);
  }

 private:
  /// Summaries of two units, one perhaps twice.
  struct two_units {
    const std::byte *first, *second;
    const std::uint8_t* codes(int unit) const {
      return reinterpret_cast<const std::uint8_t*>(unit == 0 ? first : second);
    }
  };

  /// Products of two units' means with four heads.
  template <team_of_halves T>
  typename T::pack of_means(T team, const unit_query& query, const two_units& units) const {
    const std::uint8_t *const a = units.codes(0), *const b = units.codes(1);
    const float* row = query.data;
    typename T::pack sum(0.0f);
    for (int nth = 0; nth < mean.codes; ++nth, row += row_of_four)
      sum = sum + team.load_halves(row + std::size_t{a[nth]} * 4, row + std::size_t{b[nth]} * 4);
    return sum;
  }

  /// The products of two units' tokens with four heads, to `x`; returns the largest finite ones. `base`: what
  /// their means contribute.
  template <team_of_halves T>
  typename T::pack multiply_four(T team, const unit_query& query, const two_units& units,
                                 const typename T::pack& base, float* x) const {
    using pack = typename T::pack;
    const int tokens = query.unit.tokens;
    const float* const table = query.data + mean.codes * row_of_four;
    const std::uint8_t *const a = units.codes(0) + mean.codes, *const b = units.codes(1) + mean.codes;
    const pack scale(query.scale);
    pack largest(-std::numeric_limits<float>::max());
    const auto multiply = [&]<int Tokens>(std::integral_constant<int, Tokens>, int t) {
      const float* row = table;
      const std::uint8_t *of_a = a + t, *of_b = b + t;
      pack sum[Tokens];
      FREEKV_UNROLL
      for (int i = 0; i < Tokens; ++i) sum[i] = pack(0.0f);
      for (int nth = 0; nth < token.codes; ++nth, row += row_of_four) {
        FREEKV_UNROLL
        for (int i = 0; i < Tokens; ++i)
          sum[i] = sum[i] + team.load_halves(row + std::size_t{of_a[i]} * 4, row + std::size_t{of_b[i]} * 4);
        of_a += tokens;
        of_b += tokens;
      }
      FREEKV_UNROLL
      for (int i = 0; i < Tokens; ++i) {
        sum[i] = base + scale * sum[i];
        largest = team.select_greater(sum[i], largest, sum[i], largest);
        team.store(x + (t + i) * T::width, sum[i]);
      }
    };
    int t = 0;
    for (; t + 4 <= tokens; t += 4) multiply(std::integral_constant<int, 4>{}, t);
    for (; t < tokens; t += 2) multiply(std::integral_constant<int, 2>{}, t);
    return largest;
  }

  /// offset + rows^T * centroids.
  template <team T>
  FREEKV_HD void decode_mean(T team, const float* coded, float* decoded) const {
    const int d = mean.head_dim;
    for (int i = 0; i < d; i += T::width) {
      auto sum = team.load(mean.offset + i);
      for (int r = 0; r < mean.codes * mean.dims; ++r) {
        const int c = static_cast<int>(coded[r / mean.dims]);
        sum = sum + team.load(mean.rows + r * d + i) *
                        typename T::pack(mean.centroids[r * codebook::centroids_per_code + c]);
      }
      team.store(decoded + i, sum);
    }
  }
};

static_assert(summary_policy<key_codes<>>);

}  // namespace freekv

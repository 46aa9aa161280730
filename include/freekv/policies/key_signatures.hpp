// Signatures of keys by random hyperplanes: a token is as good as the number of hash tables in which it and
// the query collide, and what collides is a sample whose chances are known.
#pragma once

#include <cmath>
#include <cstdint>
#include <freekv/config.hpp>
#include <freekv/core/size.hpp>
#include <freekv/core/splitmix.hpp>
#include <freekv/policies/key_subspace.hpp>
#include <freekv/policies/mean_summaries.hpp>
#include <span>

namespace freekv {

/// Numbers of random hyperplanes, independent and normal of mean 0 and variance 1, to all of `numbers`: the
/// i-th is a function of `seed` and i alone, so that parts are drawn in any order, and longer arrays begin as
/// shorter ones do. Computed in double and rounded, so that machines agree as far as their logarithms,
/// cosines and roots do to float32.
inline void draw_hyperplanes(std::uint64_t seed, std::span<float> numbers) {
  const auto uniform = [seed](std::uint64_t i) {  // above 0, at most 1
    return detail::unit_interval(detail::splitmix64(seed + i * 0x9e3779b97f4a7c15ull)) + 0x1p-53;
  };
  for (std::size_t i = 0; i < numbers.size(); ++i) {
    const double length = std::sqrt(-2.0 * std::log(uniform(2 * i)));
    numbers[i] = static_cast<float>(length * std::cos(6.283185307179586 * uniform(2 * i + 1)));
  }
}

namespace detail {

/// The logarithm of the probability that two vectors of that cosine agree in all of `bits` random signs in 2
/// or more of `tables` (2 or more) tables: with `w = (1 - acos(cosine) / pi)^bits` that of
/// `1 - (1 - w)^tables - tables * w * (1 - w)^(tables - 1)`. Two signs are taken to agree with a probability
/// of 2^-10 at least. NaN of a NaN.
FREEKV_HD inline float log_chance_of_two(float cosine, int bits, int tables) {
  constexpr float inverse_pi = 0.31830988618f, least = 0x1p-10f;
  if (cosine != cosine) return cosine;
  const float within = cosine > 1.0f ? 1.0f : cosine < -1.0f ? -1.0f : cosine;
  const float agree = 1.0f - ::acosf(within) * inverse_pi;
  const float log_of_one = static_cast<float>(bits) * ::logf(agree > least ? agree : least);
  const float of_one = ::expf(log_of_one), n = static_cast<float>(tables);  // of a table's collision
  if (of_one >= 1.0f) return 0.0f;
  const float odds = of_one / (1.0f - of_one), log_of_none = ::log1pf(-of_one);
  if (n * of_one >= 1.0f) return ::log1pf(-::expf(n * log_of_none + ::log1pf(n * odds)));
  // What is left of 1 would cancel: the probabilities of 2, 3, ... collisions, relative to that of 2.
  float sum = 1.0f, term = 1.0f;
  for (int j = 2; j < tables && term > 1e-8f * sum; ++j) {
    term *= static_cast<float>(tables - j) / static_cast<float>(j + 1) * odds;
    sum += term;
  }
  return ::logf(0.5f * n * (n - 1.0f)) + 2.0f * log_of_one + (n - 2.0f) * log_of_none + ::logf(sum);
}

}  // namespace detail

/// A token's codes in `Tables` hash tables, each of the `Bits` signs of its key's products with random
/// hyperplanes, once `basis.mean`, the centre of the keys, has been taken off the key; a query's are of the
/// query as it is. `basis.rows` are the hyperplanes, (tables * bits, head_dim) at least, of which the first
/// are used: normal numbers, as `draw_hyperplanes` has them. They are a KV head's own, and `head_dim` floats
/// for each bit and table: 384 KB of a head at 64 numbers and the published 10 bits and 150 tables. The score
/// of a token is the number of tables in which all bits agree with the query's; a unit's is its best
/// token's. Signs are those of float32 products, 0 counting as negative. Stored as float16: `2 * Tables`
/// bytes a token. A unit with a key that is not finite, or whose product overflows float32, scores NaN, and
/// so does such a query. (MagicPIG, arXiv 2410.16179, section 4)
template <int Bits = 10, int Tables = 150>
struct key_signatures {
  static_assert(Bits == dynamic || (Bits >= 1 && Bits <= 11), "key_signatures takes 1 to 11 bits");
  static_assert(Tables == dynamic || Tables >= 2, "key_signatures takes 2 tables or more");
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::at, hook::data, hook::prepare, hook::query_width, hook::stored,
                          hook::validate, hook::values, hook::weighs>;
  static constexpr std::string_view name = "key_signatures";
  template <class Key>
  using stored = half;  // holds whole numbers up to 2048
  count_of<Bits> bits{};
  count_of<Tables> tables{};
  subspace_basis basis{};

  FREEKV_HD constexpr int width(kv_extent unit) const { return tables * unit.tokens; }
  FREEKV_HD constexpr int query_width(int) const { return tables; }

  template <class Visit>
  void data(const Visit& visit) const {
    visit(basis.data, basis.bytes());
  }
  std::string values() const { return std::to_string(int{bits}) + ", " + std::to_string(int{tables}); }
  void validate(const summary_setting& s) const {
    const auto text = [](int n) { return std::to_string(n); };
    if (bits < 1 || bits > 11)
      throw settings_error("key_signatures: " + text(bits) + " bits; choose from 1 to 11");
    if (constexpr int most = 4096; tables < 2 || tables > most)
      throw settings_error("key_signatures: " + text(tables) + " tables; choose from 2 to " + text(most));
    if (basis.data == nullptr)
      throw settings_error(
          "key_signatures needs the keys' mean and its hyperplanes as data: take the mean of the prompt's "
          "keys or a text's, and draw_hyperplanes");
    if (basis.rank < bits * tables || basis.head_dim != s.unit.head_dim || basis.layers < s.layers ||
        basis.kv_heads != s.kv_heads)
      throw settings_error("key_signatures: the basis has " + text(basis.rank) + " hyperplanes for each of " +
                           text(basis.layers) + " layers of " + text(basis.kv_heads) + " heads, head_dim " +
                           text(basis.head_dim) + "; needed are " + text(bits * tables) + " or more for " +
                           text(s.layers) + " layers of " + text(s.kv_heads) + " heads, head_dim " +
                           text(s.unit.head_dim));
  }

  /// The policy for one head.
  struct head_policy;
  FREEKV_HD constexpr head_policy at(int layer, int head) const {
    return {bits, tables, basis.mean(layer, head), basis.rows(layer, head)};
  }
};

template <int Bits, int Tables>
struct key_signatures<Bits, Tables>::head_policy {
  template <class Key>
  using stored = half;
  count_of<Bits> bits;
  count_of<Tables> tables;
  const float* mean;
  const float* rows;

  FREEKV_HD constexpr int width(kv_extent unit) const { return tables * unit.tokens; }
  FREEKV_HD constexpr int query_width(int) const { return tables; }

  /// The query's codes.
  template <team T>
  FREEKV_HD void prepare(T team, const group_query& query, float* prepared) const {
    write_codes(team, query.head_dim, prepared, [&](int i) { return team.load(query.data + i); });
  }
  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    for (int t = 0; t < keys.unit.tokens; ++t)
      write_codes(team, keys.unit.head_dim, numbers + t * tables,
                  [&](int i) { return team.load(keys.row(t) + i) - team.load(mean + i); });
  }
  template <team T>
  FREEKV_HD float score(T team, const unit_query& query, const float* numbers) const {
    float most = -infinity;
    for (int t = 0; t < query.unit.tokens; ++t)
      most = scalar_team{}.maximum(most, collisions(team, query.data, numbers + t * tables));
    return most;
  }

  /// Log-weight of a token that is attended to because it collides with the query (1, head_dim) in 2 or more
  /// tables: minus the logarithm of the probability of that, by the cosine of the query, of any scale, with
  /// the key less the centre. Of vectors of length 0 the cosine is 0.
  template <team T, class Element>
  FREEKV_HD float log_weight(T team, const group_query& query, const Element* key) const {
    using pack = typename T::pack;
    pack products(0.0f), of_query(0.0f), of_key(0.0f);
    for (int i = 0; i < query.head_dim; i += T::width) {
      const pack q = team.load(query.data + i), k = team.load(key + i) - team.load(mean + i);
      products = products + q * k;
      of_query = of_query + q * q;
      of_key = of_key + k * k;
    }
    const float lengths = ::sqrtf(team.sum(of_query)) * ::sqrtf(team.sum(of_key));
    const float cosine = lengths == 0.0f ? 0.0f : team.sum(products) / lengths;
    return -detail::log_chance_of_two(cosine, bits, tables);
  }

 private:
  /// The codes of the vector whose numbers `load` gives.
  template <class T, class Load>
  FREEKV_HD void write_codes(T team, int head_dim, float* codes, const Load& load) const {
    for (int table = 0; table < tables; ++table) {
      int code = 0;
      bool finite = true;
      for (int bit = 0; bit < bits; ++bit) {
        const float* const row = rows + (table * bits + bit) * head_dim;
        typename T::pack products(0.0f);
        for (int i = 0; i < head_dim; i += T::width) products = products + team.load(row + i) * load(i);
        const float product = team.sum(products);
        finite = finite && product - product == 0.0f;
        code = 2 * code + static_cast<int>(product > 0.0f);
      }
      if (team.lane() == 0) codes[table] = finite ? static_cast<float>(code) : NAN;
    }
  }
  template <class T>
  FREEKV_HD float collisions(T team, const float* query, const float* codes) const {
    using pack = typename T::pack;
    const pack zero(0.0f), one(1.0f), half_a_step(0.5f);
    pack sum(0.0f);
    const int packed = tables / T::width * T::width;
    for (int i = 0; i < packed; i += T::width) {
      const pack apart = team.load(query + i) - team.load(codes + i);
      sum = sum + team.select_greater(half_a_step, apart * apart, one, zero) + apart * zero;  // NaN stays
    }
    float count = team.sum(sum);
    for (int i = packed; i < tables; ++i) {
      const float apart = query[i] - codes[i];
      count += apart != apart ? apart : apart == 0.0f ? 1.0f : 0.0f;
    }
    return count;
  }
};

static_assert(summary_policy<key_signatures<>>);

}  // namespace freekv

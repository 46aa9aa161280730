// Token-level key estimates in a subspace, quantised. Ours.
#pragma once

#include <freekv/core/size.hpp>
#include <freekv/core/unroll.hpp>
#include <freekv/policies/detail/token_codes.hpp>
#include <freekv/policies/mean_summaries.hpp>

namespace freekv {

/// The subspaces of all layers and KV heads, as data: for each (layer, head) a mean key (head_dim) followed
/// by `rank` orthonormal rows (rank, head_dim), float32, in memory that the backend can read and that
/// outlives its use. The rows are the leading eigenvectors of the keys' covariance over a prompt or a
/// calibration text.
struct subspace_basis {
  const float* data = nullptr;
  int layers = 0;
  int kv_heads = 0;
  int rank = 0;
  int head_dim = 0;

  FREEKV_HD constexpr std::size_t floats_per_head() const { return to_size(rank + 1) * to_size(head_dim); }
  constexpr std::size_t bytes() const {
    return to_size(layers * kv_heads) * floats_per_head() * sizeof(float);
  }
  FREEKV_HD constexpr const float* mean(int layer, int head) const {
    return data + to_size(layer * kv_heads + head) * floats_per_head();
  }
  FREEKV_HD constexpr const float* rows(int layer, int head) const { return mean(layer, head) + head_dim; }
};

/// Every token of the unit by its `Rank` coefficients `E (k - mu)`, in `Bits` bits (2, 3, 4 or 8) with one
/// float32 scale a token, or unquantised (32). The score is `ln sum_t exp(scale * <E q, c_t>)`: the unit's
/// log-mass up to the term of `mu`, which is the same for all units.
///
/// Numbers and storage are those of token_codes with `Rank` rows: `Rank * p * Bits / 8 + 4 * p` bytes.
template <int Rank = 24, int Bits = 3>
struct key_subspace {
  static_assert(Bits == dynamic || Bits == 2 || Bits == 3 || Bits == 4 || Bits == 8 || Bits == 32,
                "key_subspace takes 2, 3, 4 or 8 bits, or 32 for unquantised coefficients");
  using policy_kind = summary_kind;
  using hooks = hook_list<hook::at, hook::bytes, hook::data, hook::decode, hook::encode, hook::mass_term,
                          hook::prepare, hook::query_width, hook::validate, hook::values>;
  static constexpr std::string_view name = "key_subspace";
  count_of<Rank> rank{};
  count_of<Bits> bits{};
  subspace_basis basis{};

  FREEKV_HD constexpr int width(kv_extent unit) const { return codes(unit).width(); }
  FREEKV_HD constexpr int query_width(int) const { return rank; }
  template <class Key>
  FREEKV_HD constexpr std::size_t bytes(kv_extent unit) const {
    return codes(unit).bytes();
  }
  FREEKV_HD constexpr detail::token_codes codes(kv_extent unit) const { return {rank, bits, unit.tokens}; }

  template <class Visit>
  void data(const Visit& visit) const {
    visit(basis.data, basis.bytes());
  }
  std::string values() const { return std::to_string(int{rank}) + ", " + std::to_string(int{bits}); }
  void validate(const summary_setting& s) const {
    const auto text = [](int n) { return std::to_string(n); };
    if (bits != 2 && bits != 3 && bits != 4 && bits != 8 && bits != 32)
      throw settings_error("key_subspace: " + text(bits) +
                           " bits; choose 2, 3, 4 or 8, or 32 for unquantised coefficients");
    codes(s.unit).validate(name);
    if (rank < 1 || rank > s.unit.head_dim)
      throw settings_error("key_subspace: rank " + text(rank) + " is not between 1 and head_dim " +
                           text(s.unit.head_dim));
    if (basis.data == nullptr)
      throw settings_error(
          "key_subspace needs its basis as data: compute it from the prompt's keys or a text");
    if (basis.rank < rank || basis.head_dim != s.unit.head_dim || basis.layers < s.layers ||
        basis.kv_heads != s.kv_heads)
      throw settings_error("key_subspace: the basis has " + text(basis.layers) + " layers of " +
                           text(basis.kv_heads) + " heads, rank " + text(basis.rank) + ", head_dim " +
                           text(basis.head_dim) + "; needed are " + text(s.layers) + " layers of " +
                           text(s.kv_heads) + " heads, rank " + text(rank) + " or more, head_dim " +
                           text(s.unit.head_dim));
  }

  /// The policy for one head.
  struct head_policy;
  FREEKV_HD constexpr head_policy at(int layer, int head) const {
    return {*this, basis.mean(layer, head), basis.rows(layer, head)};
  }
};

template <int Rank, int Bits>
struct key_subspace<Rank, Bits>::head_policy {
  key_subspace policy;
  const float* mean;
  const float* rows;

  FREEKV_HD constexpr int width(kv_extent unit) const { return policy.width(unit); }
  FREEKV_HD constexpr int query_width(int head_dim) const { return policy.query_width(head_dim); }
  template <class Key>
  FREEKV_HD constexpr std::size_t bytes(kv_extent unit) const {
    return policy.template bytes<Key>(unit);
  }

  /// E q.
  template <team T>
  FREEKV_HD void prepare(T team, const group_query& query, float* prepared) const {
    constexpr int at_once = 4;  // rows on their way before a product is written
    const auto product = [&](int r) {
      return detail::inner_product(team, rows + r * query.head_dim, query.data, query.head_dim);
    };
    int r = 0;
    for (; r + at_once <= policy.rank; r += at_once) {
      float products[at_once];
      FREEKV_UNROLL
      for (int i = 0; i < at_once; ++i) products[i] = product(r + i);
      FREEKV_UNROLL
      for (int i = 0; i < at_once; ++i)
        if (team.lane() == 0) prepared[r + i] = products[i];
    }
    for (; r < policy.rank; ++r) {
      const float last = product(r);
      if (team.lane() == 0) prepared[r] = last;
    }
  }

  /// The product with the mean that is taken off keys.
  template <team T>
  FREEKV_HD float mass_term(T team, const group_query& query) const {
    return detail::inner_product(team, mean, query.data, query.head_dim);
  }

  template <team T>
  FREEKV_HD void summarise(T team, const unit_keys& keys, float* numbers) const {
    const int d = keys.unit.head_dim, tokens = keys.unit.tokens;
    for (int t = 0; t < tokens; ++t) {
      for (int r = 0; r < policy.rank; ++r) {
        typename T::pack product(0.0f);
        for (int i = 0; i < d; i += T::width)
          product =
              product + team.load(rows + r * d + i) * (team.load(keys.row(t) + i) - team.load(mean + i));
        numbers[r * tokens + t] = team.sum(product);
      }
      numbers[policy.rank * tokens + t] = 1.0f;
    }
  }

  template <team T>
  FREEKV_HD float score(T team, const unit_query& query, const float* numbers) const {
    return policy.codes(query.unit).log_mass(team, query.data, query.scale, 0.0f, numbers);
  }
  template <class Key, team T>
  FREEKV_HD void encode(T team, kv_extent unit, const float* numbers, std::byte* out) const {
    policy.codes(unit).encode(team, numbers, out);
  }
  template <class Key, team T>
  FREEKV_HD void decode(T team, kv_extent unit, const std::byte* in, float* numbers) const {
    policy.codes(unit).decode(team, in, numbers);
  }
};

static_assert(summary_policy<key_subspace<>>);

}  // namespace freekv

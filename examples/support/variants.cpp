#include <algorithm>
#include <iterator>

#include "choices.hpp"

namespace freekv::examples {

namespace {

// Values of policies, by the names that `method_spec` has for them. Data (a basis' rank) come with the data.
template <class Policy>
void give(method_spec&, const Policy&) {}
template <int Tokens>
void give(method_spec& m, const chunk_means<Tokens>& p) {
  m.chunk = p.tokens;
}
template <int Rank, int Bits>
void give(method_spec& m, const key_subspace<Rank, Bits>& p) {
  m.rank = p.rank;
  m.bits = p.bits;
}
template <int Bits>
void give(method_spec& m, const key_sketch<Bits>& p) {
  m.bits = p.bits;
}
template <int Bits, int Tables>
void give(method_spec& m, const key_signatures<Bits, Tables>& p) {
  m.bits = p.bits;
  m.tables = p.tables;
}
template <int Codes, int MeanCodes>
void give(method_spec& m, const key_codes<Codes, MeanCodes>& p) {
  m.codes = p.codes;
}
template <class Coarse, class Fine, int Times>
void give(method_spec& m, const coarse_to_fine<Coarse, Fine, Times>& p) {
  m.times = p.times;
}
template <int Units>
void give(method_spec& m, const pin_outliers<Units>& p) {
  m.pinned = p.units;
}
template <int Steps>
void give(method_spec& m, const every_n_steps<Steps>& p) {
  m.every = p.steps;
}
void give(method_spec& m, const key_channels& p) { m.pruned = p.pruned; }
void give(method_spec& m, const top_p& p) { m.top_p = p.p; }
void give(method_spec& m, const sticky_top_k& p) { m.bonus = p.bonus; }
void give(method_spec& m, const cosine_drift& p) { m.tau = p.tau; }
void give(method_spec& m, const mass_deficit& p) {
  m.delta = p.delta;
  m.partial = p.partial;
}
void give(method_spec& m, const missing_share& p) {
  m.delta = p.delta;
  m.partial = p.partial;
}

/// A plan's name behind the first layer, which a pipeline keeps whole unless told otherwise.
template <class Plan>
std::string plan_name(const Plan& plan) {
  switch (plan.kind(1)) {
    case layer_kind::complete:
      return "complete";
    case layer_kind::window:
      return "window";
    case layer_kind::sliding:
      return "sliding";
    default:
      return "retrieval";
  }
}
std::string plan_name(const by_head&) { return std::string(by_head::name); }

/// A method's names and values, of its policies' types and of the values that it gives to settings.
template <class Method>
method_spec spec_of() {
  method_spec m;
  if constexpr (requires { typename Method::eviction; }) {
    m.plan = "eviction";
    m.eviction = Method::eviction::name;
  } else {
    using pack = typename Method::pack;
    const auto take = [&]<class Policy>(std::string& name, const Policy& policy) {
      name = Policy::name;
      give(m, policy);
    };
    take(m.summary, typename pack::summary{});
    take(m.pooling, typename pack::pooling{});
    take(m.selection, typename pack::selection{});
    take(m.pinning, typename pack::pinning{});
    take(m.rows, typename pack::scope{});
    take(m.correction, typename pack::correction{});
    take(m.completion, typename pack::completion{});
    take(m.residency, typename pack::residency{});
    take(m.codec, typename pack::codec{});
    m.plan = plan_name(typename pack::plan{});
    m.unit = typename pack::unit{}.tokens;
    if constexpr (requires { Method::basis_of_pairs; }) m.basis_of_pairs = Method::basis_of_pairs;
    if constexpr (requires { Method::calibrated; }) m.calibrated = Method::calibrated;
    if constexpr (requires { Method::prompt_share; }) m.thin = Method::prompt_share;
    if constexpr (requires { Method::selection; }) give(m, Method::selection);
    if constexpr (requires { Method::correction; }) give(m, Method::correction);
  }
  return m;
}

/// Of interest beside others, not beside their siblings alone.
constexpr std::string_view shown_by_default[] = {"full",
                                                 "streaming_llm",
                                                 "quest",
                                                 "freekv",
                                                 "freekv_chunk_means",
                                                 "freekv_key_subspace",
                                                 "freekv_key_codes",
                                                 "freekv_key_codes_sticky"};

template <class... Methods>
std::vector<named_variant> variants_of(methods::method_list<Methods...>) {
  std::vector<named_variant> all;
  const auto add = [&](std::string_view name, const method_spec& method) {
    const bool shown = std::find(std::begin(shown_by_default), std::end(shown_by_default), name) !=
                       std::end(shown_by_default);
    all.push_back({.name = name, .method = method, .deep = !shown});
  };
  (add(Methods::name, spec_of<Methods>()), ...);
  return all;
}

std::vector<named_variant> all_variants() {
  std::vector<named_variant> all = variants_of(methods::all{});
  const auto add_behind = [&](std::string_view behind, named_variant v) {
    all.insert(std::find_if(all.begin(), all.end(), [&](const auto& one) { return one.name == behind; }) + 1,
               std::move(v));
  };
  add_behind("freekv_never", {.name = "freekv_half_budget", .budget_share = 0.5, .deep = true});
  add_behind("freekv_never", {.name = "freekv_page_16", .page = 16, .deep = true});
  add_behind("freekv_key_subspace_deficit", {.name = "freekv_key_subspace_half_budget",
                                             .method = {.summary = "key_subspace"},
                                             .budget_share = 0.5,
                                             .deep = true});
  return all;
}

}  // namespace

const std::vector<named_variant>& variants() {
  static const std::vector<named_variant> all = all_variants();
  return all;
}

}  // namespace freekv::examples

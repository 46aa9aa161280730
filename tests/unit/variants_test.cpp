// The library's methods, types, and what the programs make of their names: the same policies with the same
// values.

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "../catch.hpp"
#include "choices.hpp"

#include <freekv/methods.hpp>

namespace {

using freekv::detail::printed;
using examples_method = freekv::examples::method_spec;

/// What a method does, a line for each kind of policy.
struct policies {
  std::string summary, pooling, selection, pinning, rows, correction, residency, codec, plan;
  int unit = 0;
  bool operator==(const policies&) const = default;
};
std::ostream& operator<<(std::ostream& out, const policies& p) {
  for (const std::string& one :
       {p.summary, p.pooling, p.selection, p.pinning, p.rows, p.correction, p.residency, p.codec, p.plan})
    out << one << "; ";
  return out << "unit " << p.unit;
}

/// The plan's name in `method::plan`. Behind the first layer, which a pipeline keeps whole unless told
/// otherwise.
template <class Plan>
std::string plan_name(const Plan& plan) {
  if constexpr (std::is_same_v<Plan, freekv::by_head>) {
    return "by_head";
  } else {
    const freekv::layer_kind kind = plan.kind(1);
    return kind == freekv::layer_kind::retrieval ? "retrieval"
           : kind == freekv::layer_kind::window  ? "window"
                                                 : "complete";
  }
}

/// A summary in its own format has that for no value: "min_max()".
template <class Summary>
std::string printed_summary(const Summary& summary) {
  const std::string text = printed(summary);
  return text.ends_with("()") ? text.substr(0, text.size() - 2) : text;
}

/// Of a variant's pipeline, with the values that the variant has for its settings.
template <class Variant>
policies of_type() {
  typename Variant::template pipeline<freekv::kv_shape<float, 64>>::settings s;
  freekv::give_values<Variant>(s);
  return {printed_summary(s.summary), printed(s.pooling),    printed(s.selection), printed(s.pinning),
          printed(s.scope),           printed(s.correction), printed(s.residency), printed(s.codec),
          plan_name(s.plan),          s.unit.tokens};
}

/// Of a method by its names, as `freekv::examples::pipeline_of_shape` makes it.
policies of_strings(const examples_method& m) {
  using namespace freekv::examples;
  // key_codes and low_rank_keys have these numbers from their data.
  method_data data;
  data.codebooks.mean_codes = freekv::key_codes<6>{}.mean_codes;
  data.factors.rank = m.key_rank_of(1024);  // numbers of a token's keys in the paper
  return {printed_summary(find_by_name("summary", summaries, m.summary).make(m, data)),
          printed(find_by_name("pooling", poolings, m.pooling).make(m, data)),
          printed(find_by_name("selection", selections, m.selection).make(m, data)),
          printed(find_by_name("pinning", pinnings, m.pinning).make(m, data)),
          printed(find_by_name("rows", selection_scopes, m.rows).make(m, data)),
          printed(find_by_name("correction", corrections, m.correction).make(m, data)),
          printed(find_by_name("residency", residencies, m.residency).make(m, data)),
          printed(find_by_name("codec", codecs, m.codec).make(m, data)),
          m.plan,
          m.unit};
}

template <class... Variants>
void compare(freekv::methods::method_list<Variants...>) {
  std::set<std::string> types;
  const auto& all = freekv::examples::variants();
  const auto compare_one = [&]<class Variant>() {
    const std::string name(Variant::name);
    INFO(name);
    CHECK(types.insert(name).second);
    const auto found = std::find_if(all.begin(), all.end(), [&](const auto& v) { return v.name == name; });
    REQUIRE(found != all.end());
    if constexpr (requires { typename Variant::eviction; })
      CHECK(found->method.evicts());
    else
      CHECK(of_type<Variant>() == of_strings(found->method));
  };
  (compare_one.template operator()<Variants>(), ...);
  for (const auto& v : all) {
    INFO(v.name);
    const bool has_type = v.page == 0 && v.budget_share == 1;  // these are settings
    CHECK(types.count(std::string(v.name)) == (has_type ? 1 : 0));
  }
}

}  // namespace

TEST_CASE("the library's variants and the programs' are the same methods", "[variants]") {
  compare(freekv::methods::all{});
}

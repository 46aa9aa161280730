// A policy that takes worths and whose units are pages.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/freekv.hpp>
#include <limits>
#include <string_view>

namespace tests {

/// Pages of 8 tokens by the largest worth that was given for one of them. Where the prompt is kept all of it
/// stays when it ends, and two pages have room beside as many as it has.
struct given_pages {
  using policy_kind = freekv::eviction_kind;
  using hooks = freekv::hook_list<freekv::hook::worths>;
  static constexpr std::string_view name = "given_pages";
  static constexpr int page = 8;
  bool keeps_prompt = false;

  struct unit_state {
    float most;
  };
  constexpr int unit_tokens() const { return page; }
  constexpr bool stages_prompt() const { return !keeps_prompt; }
  constexpr int observed_rows() const { return 0; }
  constexpr int capacity(const freekv::eviction_limits& most) const {
    return page + kept({most.budget, most.max_prompt, most.max_prompt, true});
  }
  constexpr int kept(const freekv::eviction_moment& at) const {
    if (!keeps_prompt) return at.budget;
    return std::max(at.budget, (at.prompt + page - 1) / page * page + 2 * page);
  }
  constexpr bool protects(int token, const freekv::eviction_moment& at) const {
    return at.prompt_ends && token + page > at.tokens;  // it goes on
  }
  constexpr void on_append(unit_state& unit, int token) const {
    if (token % page == 0) unit.most = -std::numeric_limits<float>::infinity();
  }
  constexpr void on_given(unit_state& unit, float worth) const { unit.most = std::max(unit.most, worth); }
  constexpr void on_prompt(unit_state&, const freekv::prompt_votes&, int) const {}
  constexpr void on_attended(unit_state&, float, int) const {}
  std::uint32_t worth(const unit_state& unit) const { return freekv::order_bits(unit.most); }
};

}  // namespace tests

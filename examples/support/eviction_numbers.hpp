// Numbers of policies that evict, by their members' names.
#pragma once

#include <cmath>
#include <map>
#include <string>
#include <type_traits>

#include "choices.hpp"

namespace freekv::examples {

/// Calls `visit(name, member)` for each number that a policy has by itself: what comes with a model or with
/// the shape (its heads, votes, lists) is not among them.
template <class Policy, class Visit>
void for_each_number(Policy& policy, const Visit& visit) {
  if constexpr (requires { policy.alpha; }) visit("alpha", policy.alpha);
  if constexpr (requires { policy.beta; }) visit("beta", policy.beta);
  if constexpr (requires { policy.block_tokens; }) visit("block_tokens", policy.block_tokens);
  if constexpr (requires { policy.gamma; }) visit("gamma", policy.gamma);
  if constexpr (requires { policy.heavy; }) visit("heavy", policy.heavy);
  if constexpr (requires { policy.interval; }) visit("interval", policy.interval);
  if constexpr (requires { policy.keeps_prompt; }) visit("keeps_prompt", policy.keeps_prompt);
  if constexpr (requires { policy.kernel; }) visit("kernel", policy.kernel);
  if constexpr (requires { policy.lambda; }) visit("lambda", policy.lambda);
  if constexpr (requires { policy.p; }) visit("p", policy.p);
  if constexpr (requires { policy.page; }) visit("page", policy.page);
  if constexpr (requires { policy.recent; }) visit("recent", policy.recent);
  if constexpr (requires { policy.room; }) visit("room", policy.room);
  if constexpr (requires { policy.similar; }) visit("similar", policy.similar);
  if constexpr (requires { policy.sink; }) visit("sink", policy.sink);
  if constexpr (requires { policy.takers; }) visit("takers", policy.takers);
  if constexpr (requires { policy.tau1; }) visit("tau1", policy.tau1);
  if constexpr (requires { policy.tau2; }) visit("tau2", policy.tau2);
  if constexpr (requires { policy.tau3; }) visit("tau3", policy.tau3);
  if constexpr (requires { policy.threshold; }) visit("threshold", policy.threshold);
  if constexpr (requires { policy.window; }) visit("window", policy.window);
}

/// Gives a policy numbers by their names. Throws choice_error where it has none of a name, or a whole number
/// is none.
template <class Policy>
void give_numbers(Policy& policy, const std::map<std::string, double>& numbers) {
  for (const auto& one : numbers) {
    const std::string& wanted = one.first;
    const double number = one.second;
    std::string names;
    bool given = false;
    for_each_number(policy, [&]<class Number>(const char* name, Number& member) {
      names += (names.empty() ? "" : ", ") + std::string(name);
      if (name != wanted) return;
      given = true;
      const auto refuse = [&](const char* what) {
        throw choice_error(std::string(Policy::name) + ": " + wanted + " of " +
                           freekv::detail::decimal(static_cast<float>(number)) + what);
      };
      if (std::is_same_v<Number, bool> && number != 0.0 && number != 1.0) refuse(" is neither 0 nor 1");
      if (std::is_same_v<Number, int> && !(std::abs(number) <= 0x1p30 && number == std::trunc(number)))
        refuse(" is not a whole number, or too large");
      member = static_cast<Number>(number);
    });
    if (!given)
      throw choice_error(std::string(Policy::name) + " has no number " + cited(wanted) +
                         (names.empty() ? "; it has none" : "; choose among " + names));
  }
}

}  // namespace freekv::examples

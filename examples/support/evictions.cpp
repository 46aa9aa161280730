// Policies that evict, and their numbers by their members' names.
#include <algorithm>
#include <cmath>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "choices.hpp"

namespace freekv::examples {

namespace {

/// A number that a policy has by itself, and its name.
struct policy_number {
  const char* name;
  std::variant<int*, float*, bool*> member;
};

/// A policy's numbers. What comes with a model or with the shape (its heads, votes, lists) is not among them.
template <class Policy>
std::vector<policy_number> numbers_of(Policy& policy) {
  std::vector<policy_number> all;
  if constexpr (requires { policy.alpha; }) all.push_back({"alpha", &policy.alpha});
  if constexpr (requires { policy.beta; }) all.push_back({"beta", &policy.beta});
  if constexpr (requires { policy.block_tokens; }) all.push_back({"block_tokens", &policy.block_tokens});
  if constexpr (requires { policy.gamma; }) all.push_back({"gamma", &policy.gamma});
  if constexpr (requires { policy.heavy; }) all.push_back({"heavy", &policy.heavy});
  if constexpr (requires { policy.interval; }) all.push_back({"interval", &policy.interval});
  if constexpr (requires { policy.keeps_prompt; }) all.push_back({"keeps_prompt", &policy.keeps_prompt});
  if constexpr (requires { policy.kernel; }) all.push_back({"kernel", &policy.kernel});
  if constexpr (requires { policy.lambda; }) all.push_back({"lambda", &policy.lambda});
  if constexpr (requires { policy.p; }) all.push_back({"p", &policy.p});
  if constexpr (requires { policy.page; }) all.push_back({"page", &policy.page});
  if constexpr (requires { policy.recent; }) all.push_back({"recent", &policy.recent});
  if constexpr (requires { policy.room; }) all.push_back({"room", &policy.room});
  if constexpr (requires { policy.similar; }) all.push_back({"similar", &policy.similar});
  if constexpr (requires { policy.sink; }) all.push_back({"sink", &policy.sink});
  if constexpr (requires { policy.takers; }) all.push_back({"takers", &policy.takers});
  if constexpr (requires { policy.tau1; }) all.push_back({"tau1", &policy.tau1});
  if constexpr (requires { policy.tau2; }) all.push_back({"tau2", &policy.tau2});
  if constexpr (requires { policy.tau3; }) all.push_back({"tau3", &policy.tau3});
  if constexpr (requires { policy.threshold; }) all.push_back({"threshold", &policy.threshold});
  if constexpr (requires { policy.window; }) all.push_back({"window", &policy.window});
  return all;
}

/// Gives the numbers of `policy`, a name, that are `there` others. Throws choice_error where there is none of
/// a name, or a whole number is none.
void give_numbers(const std::vector<policy_number>& there, std::string_view policy,
                  const std::map<std::string, double>& numbers) {
  for (const auto& one : numbers) {
    const std::string& wanted = one.first;
    const double number = one.second;
    const auto found =
        std::find_if(there.begin(), there.end(), [&](const policy_number& n) { return n.name == wanted; });
    if (found == there.end()) {
      std::string names;
      for (const policy_number& n : there)
        names += (names.empty() ? "; choose among " : ", ") + std::string(n.name);
      throw choice_error(std::string(policy) + " has no number " + cited(wanted) +
                         (names.empty() ? "; it has none" : names));
    }
    const auto refuse = [&](const char* what) {
      std::ostringstream printed;
      printed << number;
      throw choice_error(std::string(policy) + ": " + wanted + " of " + printed.str() + what);
    };
    if (float* const* const real = std::get_if<float*>(&found->member)) **real = nearest_float(number);
    if (int* const* const whole = std::get_if<int*>(&found->member)) {
      if (!(std::abs(number) <= 0x1p30 && number == std::trunc(number)))
        refuse(" is not a whole number, or too large");
      **whole = static_cast<int>(number);
    }
    if (bool* const* const flag = std::get_if<bool*>(&found->member)) {
      if (number != 0.0 && number != 1.0) refuse(" is neither 0 nor 1");
      **flag = number != 0.0;
    }
  }
}

}  // namespace

eviction_list::any eviction_of(const method_spec& m, const method_data& data) {
  eviction_list::any made = find_by_name("eviction", eviction_list::choices, m.eviction).make(m, data);
  const auto numbers = std::visit([](auto& policy) { return numbers_of(policy); }, made.chosen);
  give_numbers(numbers, m.eviction, m.eviction_values);
  return made;
}

}  // namespace freekv::examples

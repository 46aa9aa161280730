// Prints the tables of docs/policies.md: of policies by backend, from the lists that the programs are
// compiled with, those for devices among them, and of the library's methods. Given a page, exits with 1
// unless they stand there; with --write, puts them where the page has tables with these first lines.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "choices.hpp"
#include "device_pipeline.hpp"

namespace {

using namespace freekv::examples;
using names = std::vector<std::string>;

template <class Policy>
std::string name_of() {
  return std::string(Policy::name);
}
template <class... Policies>
names names_in(const freekv::any_of<Policies...>&) {
  return {name_of<Policies>()...};
}
template <class... Fast, class... Slow>
names names_in(const freekv::any_of<freekv::layout_pair<Fast, Slow>...>&) {
  return {name_of<Fast>() + "/" + name_of<Slow>()...};
}

std::string list_of(const names& all) {
  std::string list;
  for (const std::string& name : all) list += (list.empty() ? "`" : ", `") + name + "`";
  return list;
}
std::string row_of(const std::string& kind, const std::string& both, const std::string& host_alone) {
  const auto cell = [](const std::string& text) { return text.empty() ? " |" : " " + text + " |"; };
  return "| " + kind + " |" + cell(both) + cell(host_alone) + "\n";
}
std::string row_of(const std::string& kind, const names& host, const names& device) {
  names both, host_alone;
  for (const std::string& name : host)
    (std::find(device.begin(), device.end(), name) != device.end() ? both : host_alone).push_back(name);
  return row_of(kind, list_of(both), list_of(host_alone));
}
template <class Host, class Device>
std::string row_of(const std::string& kind) {
  return row_of(kind, names_in(Host{}), names_in(Device{}));
}
/// Of numbers that are chosen at run time.
std::string row_of_numbers(const std::string& kind, const std::string& numbers, bool on_device) {
  return row_of(kind, on_device ? numbers : "", on_device ? "" : numbers);
}

constexpr const char* policies_head =
    "| policies, by the names that programs take | host and CUDA | host alone |\n";
constexpr const char* methods_head = "| method | as policies | what it does | published |\n";

std::string policy_rows() {
  namespace device = for_devices;
  constexpr bool any_page = std::is_same_v<device::page, freekv::page_size<freekv::dynamic>>;
  constexpr bool any_unit = std::is_same_v<device::unit, freekv::unit<freekv::dynamic>>;
  return std::string(policies_head) + "|---|---|---|\n" +
         row_of_numbers("page size", "any multiple of 8 from 8 to 256", any_page) +
         row_of_numbers("unit", "a page, or any divisor of its tokens", any_unit) +
         row_of<summary_list::any, device::summary>("summary") +
         row_of<pooling_list::any, device::pooling>("pooling") +
         row_of<selection_list::any, device::selection>("selection") +
         row_of<pinning_list::any, device::pinning>("pinning") +
         row_of<scope_list::any, device::rows>("rows") +
         row_of<correction_list::any, device::correction>("correction") +
         row_of("completion", names_in(completion_list::any{}), {name_of<freekv::no_completion>()}) +
         row_of<residency_list::any, device::residency>("residency") +
         row_of<codec_list::any, device::codec>("codec") + row_of<any_plan, device::plan>("plan") +
         row_of<any_route, device::route>("route") +
         row_of<any_layouts, device::layouts>("layouts, fast and slow") +
         row_of("eviction", names_in(eviction_list::any{}), {});
}

/// A method's policies: summary and correction where it retrieves, and what is not the default.
template <class Method>
std::string policies_of() {
  names policies;
  if constexpr (requires { typename Method::eviction; }) {
    policies.push_back(std::string(Method::eviction::name));
  } else {
    using pack = typename Method::pack;
    constexpr bool by_plan = !std::is_same_v<typename pack::plan, freekv::plan_kind::default_policy>;
    const auto add = [&]<class Policy>(const Policy& policy, bool always) {
      if (always || !std::is_same_v<Policy, typename Policy::policy_kind::default_policy>)
        policies.push_back(freekv::detail::printed(policy));
    };
    if constexpr (requires { Method::prompt_share; })
      policies.push_back("thin_prompt(" + freekv::detail::decimal(Method::prompt_share) + ")");
    add(typename pack::plan{}, false);
    if constexpr (int{typename pack::unit{}.tokens} != 0)
      policies.push_back("unit(" + std::to_string(typename pack::unit{}.tokens) + ")");
    add(typename pack::summary{}, !by_plan);
    add(typename pack::pooling{}, false);
    if constexpr (requires { Method::selection; })
      add(Method::selection, true);
    else
      add(typename pack::selection{}, false);
    add(typename pack::pinning{}, false);
    add(typename pack::scope{}, false);
    if constexpr (requires { Method::correction; })
      add(Method::correction, true);
    else
      add(typename pack::correction{}, !by_plan);
    add(typename pack::completion{}, false);
    add(typename pack::codec{}, false);
  }
  return list_of(policies);
}

template <class... Methods>
std::string method_rows(freekv::methods::method_list<Methods...>) {
  const auto row = []<class Method>(std::type_identity<Method>) {
    const std::string published(Method::published);
    return "| `" + name_of<Method>() + "` | " + policies_of<Method>() + " | " + std::string(Method::about) +
           (published.empty() ? " | |\n" : " | " + published + " |\n");
  };
  return std::string(methods_head) + "|---|---|---|---|\n" + (row(std::type_identity<Methods>{}) + ...);
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::pair<std::string, std::string>> tables{
      {policies_head, policy_rows()}, {methods_head, method_rows(freekv::methods::all{})}};
  if (argc < 2) {
    for (const auto& [head, table] : tables) std::cout << table << "\n";
    return 0;
  }
  std::ifstream file(argv[1]);
  std::string page{std::istreambuf_iterator<char>(file), {}};
  const bool writes = argc > 2 && std::string(argv[2]) == "--write";
  for (const auto& [head, table] : tables) {
    const std::size_t begin = page.find("\n" + head) + 1;
    if (begin == 0) {
      std::cout << argv[1] << " has no table that begins with:\n" << head;
      return 1;
    }
    const std::size_t size = page.find("\n\n", begin) + 1 - begin;
    if (page.compare(begin, size, table) == 0) continue;
    if (!writes) {
      std::cout << argv[1] << " does not have this table; `" << argv[0] << " " << argv[1]
                << " --write` puts it there:\n\n"
                << table;
      return 1;
    }
    page.replace(begin, size, table);
  }
  if (writes) std::ofstream(argv[1]) << page;
  return 0;
}

// Prints the table of policies by backend of docs/policies.md, from the lists that the programs are compiled with, those for
// devices among them. Given a page, exits with 1 unless the table stands there.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <type_traits>
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

std::string table() {
  namespace device = for_devices;
  constexpr bool any_page = std::is_same_v<device::page, freekv::page_size<freekv::dynamic>>;
  constexpr bool any_unit = std::is_same_v<device::unit, freekv::unit<freekv::dynamic>>;
  return "| policies, by the names that programs take | host and CUDA | host alone |\n|---|---|---|\n" +
         row_of_numbers("page size", "any multiple of 8 from 8 to 256", any_page) +
         row_of_numbers("unit", "a page, or any divisor of its tokens", any_unit) +
         row_of<summary_list::any, device::summary>("summary") +
         row_of<pooling_list::any, device::pooling>("pooling") +
         row_of<selection_list::any, device::selection>("selection") +
         row_of<pinning_list::any, device::pinning>("pinning") +
         row_of<scope_list::any, device::rows>("rows") +
         row_of<correction_list::any, device::correction>("correction") +
         row_of<residency_list::any, device::residency>("residency") +
         row_of<codec_list::any, device::codec>("codec") + row_of<any_plan, device::plan>("plan") +
         row_of<any_route, device::route>("route") +
         row_of<any_layouts, device::layouts>("layouts, fast and slow") +
         row_of("eviction", names_in(eviction_list::any{}), {});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cout << table();
    return 0;
  }
  std::ifstream file(argv[1]);
  const std::string page{std::istreambuf_iterator<char>(file), {}};
  if (page.find("\n" + table() + "\n") != std::string::npos) return 0;
  std::cout << argv[1] << " does not have this table, which " << argv[0] << " prints:\n\n" << table();
  return 1;
}

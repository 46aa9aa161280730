// Prints the README's table of policies by backend, from the lists that the programs are compiled with. Given a README, exits
// with 1 unless the table stands there.
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

#include "choices.hpp"

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
template <class List>
std::string row_of_both(const std::string& kind, const List& list) {
  return "| " + kind + " | " + list_of(names_in(list)) + " | |\n";
}
template <class List>
std::string row_of_host(const std::string& kind, const List& list) {
  return "| " + kind + " | | " + list_of(names_in(list)) + " |\n";
}

std::string table() {
  return "| policies, by the names that programs take | host and CUDA | host alone |\n|---|---|---|\n" +
         row_of_both("summary", summary_list::any{}) + row_of_both("pooling", pooling_list::any{}) +
         row_of_both("selection", selection_list::any{}) + row_of_both("pinning", pinning_list::any{}) +
         row_of_both("rows", rows_list::any{}) + row_of_both("correction", correction_list::any{}) +
         row_of_both("residency", residency_list::any{}) + row_of_both("codec", codec_list::any{}) +
         row_of_both("plan", any_plan{}) + row_of_both("route", any_route{}) +
         row_of_both("layouts, fast and slow", any_layouts{}) + row_of_host("eviction", eviction_list::any{});
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cout << table();
    return 0;
  }
  std::ifstream file(argv[1]);
  const std::string readme{std::istreambuf_iterator<char>(file), {}};
  if (readme.find("\n" + table() + "\n") != std::string::npos) return 0;
  std::cout << argv[1] << " does not have this table, which " << argv[0] << " prints:\n\n" << table();
  return 1;
}

// Prints the README's table of policies by backend, from the lists that the programs are compiled with. Given a README, exits
// with 1 unless the table stands there.
#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

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

template <class OnHost, class OnDevice>
std::string row(const std::string& kind, const OnHost& on_host, const OnDevice& on_device) {
  std::string both, host_alone;
  const names there = names_in(on_device);
  for (const std::string& name : names_in(on_host)) {
    std::string& list = std::find(there.begin(), there.end(), name) != there.end() ? both : host_alone;
    list += (list.empty() ? "`" : ", `") + name + "`";
  }
  return "| " + kind + " | " + both + " | " + host_alone + " |\n";
}
template <class OnHost>
std::string row(const std::string& kind, const OnHost& on_both) {
  return row(kind, on_both, on_both);
}

std::string table() {
  return "| policies, by the names that programs take | host and CUDA | host alone |\n|---|---|---|\n" +
         row("summary", summary_list::any{}) + row("pooling", pooling_list::any{}) +
         row("selection", selection_list::any{}) + row("pinning", pinning_list::any{}) +
         row("rows", rows_list::any{}) + row("correction", correction_list::any{}) +
         row("residency", residency_list::any{}) + row("plan", any_plan{}) + row("route", any_route{}) +
         row("layouts, fast and slow", any_layouts{}) +
         row("codec", codec_list::any{}, device_codec_list::any{});
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

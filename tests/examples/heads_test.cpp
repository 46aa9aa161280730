// freekv-heads on the recorded layer, and its list in freekv-replay.

#include <fstream>
#include <nlohmann/json.hpp>

#include "../catch.hpp"
#include "../files.hpp"
#include "run_program.hpp"

using namespace tests;

namespace {

const std::string folder_of_traces = std::filesystem::path(FREEKV_TRACE).parent_path();

program_end find_heads(const std::string& list, const std::string& share) {
  return run_program({FREEKV_HEADS, folder_of_traces, "--out", list, "--share", share, "--page", "16",
                      "--sink", "16", "--window", "64"});
}

/// The lines of a list without comments.
std::vector<std::string> lines_of(const std::string& list) {
  std::ifstream in(list);
  std::vector<std::string> lines;
  for (std::string line; std::getline(in, line);) {
    line.erase(std::min(line.find('#'), line.size()));
    while (!line.empty() && line.back() == ' ') line.pop_back();
    if (!line.empty()) lines.push_back(line);
  }
  return lines;
}

double error_of(const std::vector<std::string>& more) {
  std::vector<std::string> command{FREEKV_REPLAY, FREEKV_TRACE, "--page",   "16",
                                   "--sink",      "16",         "--window", "64"};
  command.insert(command.end(), more.begin(), more.end());
  const auto end = run_program(command);
  INFO(end);
  REQUIRE(end.exit_code == 0);
  return nlohmann::json::parse(end.out).at("error").at("relative_l2_mean");
}

}  // namespace

TEST_CASE("the heads that look furthest back keep everything", "[heads]") {
  const scratch_folder folder;
  const std::string list = folder / "heads.txt";
  const auto end = find_heads(list, "0.34");
  INFO(end);
  REQUIRE(end.exit_code == 0);
  const auto lines = lines_of(list);
  REQUIRE(lines.size() == 3);
  CHECK(std::count_if(lines.begin(), lines.end(), [](const auto& l) { return l.ends_with("complete"); }) ==
        1);
  CHECK(lines[0].ends_with("complete"));

  const double window = error_of({"--variant", "streaming_llm"});
  const double one = error_of({"--variant", "razor_attention", "--heads", list});
  CHECK(one < window);
  // Keeping another head instead helps less.
  std::ofstream(list) << lines[2].substr(0, lines[2].rfind(' ')) << " complete\n";
  CHECK(one < error_of({"--variant", "razor_attention", "--heads", list}));
  REQUIRE(find_heads(list, "1").exit_code == 0);
  CHECK(error_of({"--variant", "razor_attention", "--heads", list}) < 1e-5);
}

TEST_CASE("freekv-heads says what it cannot do", "[heads]") {
  const scratch_folder folder;
  for (const auto& [traces, share] : {std::pair<std::string, std::string>{folder / "none", "0.5"},
                                      {folder_of_traces, "1.5"},
                                      {folder_of_traces, "some"}}) {
    const auto end = run_program({FREEKV_HEADS, traces, "--out", folder / "heads.txt", "--share", share});
    INFO(end);
    CHECK(end.exit_code == 2);
    CHECK(end.err.starts_with("freekv-heads: "));
    CHECK(std::count(end.err.begin(), end.err.end(), '\n') == 1);
  }
}

// Lines of results: whole where they are finished, and none is lost without a word.

#include "report.hpp"

#include "../catch.hpp"
#include "../files.hpp"
#include "safetensors.hpp"

using freekv::examples::file_error;
using freekv::examples::json_lines;

TEST_CASE("lines take their place when they are finished", "[report]") {
  const tests::scratch_folder folder;
  json_lines lines((folder / "results.jsonl").string(), {{"commit", "this"}});
  lines.add("quality", "full", "divergence", 0.5, "nats");
  CHECK(folder.listing() == std::vector<std::string>{"results.jsonl.part"});
  lines.finish();
  CHECK(folder.listing() == std::vector<std::string>{"results.jsonl"});
}

TEST_CASE("the first line that a full disk does not take says so", "[report]") {
  const tests::scratch_folder folder;
  tests::fs::create_symlink("/dev/full", folder / "results.jsonl.part");
  json_lines lines((folder / "results.jsonl").string(), nlohmann::ordered_json::object());
  CHECK_THROWS_WITH(lines.add("quality", "full", "divergence", 0.5, "nats"),
                    Catch::Contains("results.jsonl.part' cannot be written, as on a full disk; it has the "
                                    "lines before 'divergence' of full"));
}

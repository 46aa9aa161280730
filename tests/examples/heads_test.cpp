// freekv-heads on the recorded layer, and its list in freekv-replay.

#include <fstream>
#include <nlohmann/json.hpp>

#include "../catch.hpp"
#include "../files.hpp"
#include "run_program.hpp"
#include "tensor_file.hpp"

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
  // One token for what has left loses less than nothing for it.
  CHECK(error_of({"--variant", "razor_attention_compensated", "--heads", list}) < one);
  // Keeping another head instead helps less.
  std::ofstream(list) << lines[2].substr(0, lines[2].rfind(' ')) << " complete\n";
  CHECK(one < error_of({"--variant", "razor_attention", "--heads", list}));
  REQUIRE(find_heads(list, "1").exit_code == 0);
  for (const char* variant : {"razor_attention", "razor_attention_compensated"})
    CHECK(error_of({"--variant", variant, "--heads", list}) < 1e-5);
}

TEST_CASE("echo and induction heads are found on a text that repeats itself", "[heads]") {
  // Two KV heads of one query head on 4 times 40 tokens, token t of all four with the key e_t: in layer 3
  // head 0 looks for what followed its token, head 1 for its own place; in layer 4 head 0 for the token
  // itself, head 1 for token 0; layer 0 is as layer 4.
  const scratch_folder folder;
  constexpr int period = 40, tokens = 4 * period, d = 64;
  const auto store_layer = [&](int layer, const auto& look_for, bool repeats) {
    std::vector<float> q(tokens * 2 * d), k(q), v(q);
    for (int t = 0; t < tokens; ++t)
      for (int head = 0; head < 2; ++head) {
        const auto row = static_cast<std::size_t>((t * 2 + head) * d);
        k[row + static_cast<std::size_t>(t % period)] = 1;
        k[row + 63] = static_cast<float>(t) / tokens;  // what place it is
        const int wanted = look_for(head, t % period);
        q[row + static_cast<std::size_t>(wanted)] = wanted == 63 ? 800 : 80;
      }
    const auto one = [&](const std::vector<float>& of) {
      return tensor_text{"F32", {tokens, 2, d}, bytes_of(of, "F32")};
    };
    std::map<std::string, std::string> metadata{{"prompt_len", std::to_string(3 * period)},
                                                {"layer", std::to_string(layer)}};
    if (repeats) metadata["period"] = std::to_string(period);
    store(folder / ("layer-" + std::to_string(layer) + ".safetensors"),
          parts_of({{"q", one(q)}, {"k", one(k)}, {"v", one(v)}}, metadata).whole());
  };
  const auto echo = [](int head, int t) { return head == 0 ? t : 0; };
  store_layer(
      3, [](int head, int t) { return head == 0 ? (t + 1) % period : 63; }, true);
  store_layer(4, echo, true);
  store_layer(0, echo, true);
  const auto found = [&](const std::vector<std::string>& more) {
    std::vector<std::string> command{FREEKV_HEADS, folder.path(), "--out", folder / "list", "--by", "echo"};
    command.insert(command.end(), more.begin(), more.end());
    const auto end = run_program(command);
    INFO(end);
    REQUIRE(end.exit_code == 0);
    auto lines = lines_of(folder / "list");
    std::sort(lines.begin(), lines.end());
    return lines;
  };
  CHECK(found({"--share", "0.5"}) ==
        std::vector<std::string>{"3 0 complete", "3 1 window", "4 0 complete", "4 1 window"});
  const auto published = found({});  // 0.15 of 4 heads
  CHECK(std::count_if(published.begin(), published.end(),
                      [](const auto& l) { return l.ends_with("complete"); }) == 1);
  CHECK(found({"--complete-layers", "0"}).size() == 6);

  store_layer(4, echo, false);
  const auto end = run_program({FREEKV_HEADS, folder.path(), "--out", folder / "list", "--by", "echo"});
  INFO(end);
  CHECK(end.exit_code == 2);
  CHECK(end.err.find("layer-4.safetensors\" does not say after how many tokens it repeats itself") !=
        std::string::npos);
}

TEST_CASE("query heads that look for their whole passage are found", "[heads]") {
  // Two KV heads of two query heads each on 4 times 40 tokens in passages of 8. In layer 3 query head 1 looks
  // for its passage, head 3 for what followed its token, head 0 for token 0 and head 2 for what is half a
  // text away.
  const scratch_folder folder;
  constexpr int period = 40, tokens = 4 * period, d = 64;
  std::vector<float> q(tokens * 4 * d), k(tokens * 2 * d), v(k);
  for (int t = 0; t < tokens; ++t) {
    const int at = t % period;
    for (int head = 0; head < 2; ++head) {
      const auto row = static_cast<std::size_t>((t * 2 + head) * d);
      k[row + static_cast<std::size_t>(at)] = k[row + static_cast<std::size_t>(period + at / 8)] = 1;
    }
    const int wanted[] = {0, period + at / 8, (at + period / 2) % period, (at + 1) % period};
    for (int head = 0; head < 4; ++head) q[static_cast<std::size_t>((t * 4 + head) * d + wanted[head])] = 80;
  }
  const auto one = [&](const std::vector<float>& of, int heads) {
    return tensor_text{"F32", {tokens, heads, d}, bytes_of(of, "F32")};
  };
  store(folder / "layer-3.safetensors",
        parts_of(
            {{"q", one(q, 4)}, {"k", one(k, 2)}, {"v", one(v, 2)}},
            {{"prompt_len", std::to_string(3 * period)}, {"layer", "3"}, {"period", std::to_string(period)}})
            .whole());
  const auto found = [&](int span, int voters) {
    const auto end = run_program({FREEKV_HEADS, folder.path(), "--out", folder / "list", "--by", "span",
                                  "--span", std::to_string(span), "--voters", std::to_string(voters)});
    INFO(end);
    REQUIRE(end.exit_code == 0);
    return lines_of(folder / "list");
  };
  // Head 3 has 7/8, as what follows a passage's last token is in the next; of head 1 the last repetition has
  // a part, so that it has 24/(24 + j) at the j-th token.
  const auto all = found(8, 4);
  REQUIRE(all.size() == 4);
  CHECK((all[0] == "3 3" && all[1] == "3 1"));
  CHECK(found(8, 1) == std::vector<std::string>{"3 3"});
  // Of passages of two tokens head 3 finds half, of single ones none.
  CHECK(found(2, 1) == std::vector<std::string>{"3 3"});
  CHECK(found(1, 1) == std::vector<std::string>{"3 1"});
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

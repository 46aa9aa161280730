// freekv-replay --events: what a server's sequences do, against the oracle, and what is refused.

#include <map>
#include <memory>
#include <optional>

#include "../property/compare_step.hpp"
#include "refusal.hpp"

namespace {

using namespace tests;

constexpr int tokens = 160, head_dim = 64;

struct trace_data {
  std::vector<float> q, k, v;
};

/// The form that all traces here have: 6 query heads, 2 KV heads, float32.
random_case form(std::uint64_t seed) {
  random_case c;
  c.seed = seed;
  auto& o = c.options;
  o.element = data_type::f32;
  o.head_dim = head_dim;
  o.query_heads = 6;
  o.kv_heads = 2;
  o.page = 8;
  o.budget = {8, 16, 3};
  o.max_decode_rows = 4;
  dice d(seed);
  c.basis_data = random_basis(d, o.kv_heads, o.method.rank,
                              o.head_dim);  // which the oracle asks for, whatever the summary
  o.basis = {nullptr, 1, o.kv_heads, o.method.rank, o.head_dim};
  return c;
}

trace_data write_trace(const std::filesystem::path& path, std::uint64_t seed) {
  const random_case c = form(seed);
  token_source source(c);
  trace_data t;
  for (int i = 0; i < tokens; ++i) {
    source.next();
    t.q.insert(t.q.end(), source.queries.begin(), source.queries.end());
    t.k.insert(t.k.end(), source.keys.begin(), source.keys.end());
    t.v.insert(t.v.end(), source.values.begin(), source.values.end());
  }
  store(path, parts_of({{"q", {"F32", {tokens, 6, head_dim}, bytes_of(t.q, "F32")}},
                        {"k", {"F32", {tokens, 2, head_dim}, bytes_of(t.k, "F32")}},
                        {"v", {"F32", {tokens, 2, head_dim}, bytes_of(t.v, "F32")}}},
                       {{"prompt_len", "10"}})
                  .whole());
  return t;
}

std::vector<std::string> command(const std::filesystem::path& events, const std::filesystem::path& out) {
  return {FREEKV_REPLAY, "--events", events, "--page", "8",     "--sink", "8",
          "--window",    "16",       "--k",  "3",      "--out", out};
}

std::vector<std::string> with_rows(const std::string& rows, std::vector<std::string> command) {
  command.insert(command.end(), {"--rows", rows});
  return command;
}

/// Draws events and keeps the oracle's word for all that they give.
class drawn_events {
 public:
  drawn_events(std::uint64_t seed, const std::vector<trace_data>& traces, const std::string& rows)
      : case_(form(seed)), dice_(seed), traces_(traces) {
    case_.options.method.rows = rows;
  }

  std::string file() {
    open();
    for (int i = 0; i < 40; ++i) {
      switch (dice_.below(9)) {
        case 0:
          if (live_.size() < 5) open();
          break;
        case 1:
          fork();
          break;
        case 2:
          truncate();
          break;
        case 3:
          wait();
          break;
        case 4:
          prompt();
          break;
        default:
          step();
          break;
      }
    }
    return text_;
  }

  /// Against the file that the program wrote. Throws `disagreement`.
  void compare(const tensor_map& got, coverage& seen) {
    for (auto& [name, all] : expected_) {
      const std::string n = std::to_string(name);
      const auto out = elements_of<float>(got.at("out." + n)), lse = elements_of<float>(got.at("lse." + n));
      const auto selected = elements_of<std::int32_t>(got.at("selected." + n));
      const auto recalled = elements_of<std::int32_t>(got.at("recalled." + n));
      const auto corrected = elements_of<std::uint8_t>(got.at("corrected." + n));
      const std::size_t selecting =
          case_.options.method.rows == "per_query_head" ? 6 : 2;  // rows of `selected`
      std::size_t row = 0, at = 0;
      for (const one_step& s : all) {
        const auto pages = std::span(selected).subspan(at * selecting * 3, selecting * 3);
        const std::string where = sentence("sequence ", n, ", step ", at);
        const auto rows = static_cast<std::size_t>(s.rows);
        const auto of_out = std::span(out).subspan(row * 6 * head_dim, rows * 6 * head_dim);
        const auto of_lse = std::span(lse).subspan(row * 6, rows * 6);
        if (!s.decode) {
          for (std::size_t i = 0; i < 6; ++i)
            if (!close(of_lse[of_lse.size() - 6 + i], s.full.lse[i], 1e-5))
              throw disagreement{where + ": lse of a prompt row"};
          if (std::any_of(pages.begin(), pages.end(), [](int page) { return page != -1; }))
            throw disagreement{where + ": a prompt selects"};
        } else {
          // What the file does not have is as the oracle says.
          std::vector<std::int32_t> counts(2),
              before{s.want.rows[0].recalled_before_attention, s.want.rows[1].recalled_before_attention},
              promoted{s.want.rows[0].promoted, s.want.rows[1].promoted};
          const selected_lists lists = lists_of(pages);
          for (std::size_t h = 0; h < 2; ++h) counts[h] = lists.count[h];
          const freekv::step_report report{std::span(corrected).subspan(at * 2, 2),
                                           std::span(recalled).subspan(at * 2, 2),
                                           before,
                                           promoted,
                                           lists.pages,
                                           counts,
                                           lists.masks};
          s.comparison.compare(where, case_, s.want, report, of_out, of_lse, seen);
        }
        row += rows;
        ++at;
      }
      if (out.size() != row * 6 * head_dim || recalled.size() != at * 2)
        throw disagreement{sentence("sequence ", n, " has ", out.size(), " numbers of output in ",
                                    recalled.size(), " / 2 steps")};
    }
  }

 private:
  /// What the file says of a step, as reports have it: (KV heads, 9), and with masks where rows are query
  /// heads.
  struct selected_lists {
    std::vector<std::int32_t> pages = std::vector<std::int32_t>(2 * 9, -1);
    std::vector<std::uint32_t> masks{};
    std::int32_t count[2] = {};
  };
  static selected_lists lists_of(std::span<const std::int32_t> rows) {
    selected_lists lists;
    const std::size_t group = rows.size() / 3 / 2;
    if (group > 1) lists.masks.resize(lists.pages.size());
    for (std::size_t h = 0; h < 2; ++h) {
      std::map<std::int32_t, std::uint32_t> heads_of;
      for (std::size_t i = h * group * 3; i < (h + 1) * group * 3; ++i)
        if (rows[i] >= 0) heads_of[rows[i]] |= 1u << (i / 3 - h * group);
      for (const auto& [page, heads] : heads_of) {
        const std::size_t at = h * 9 + static_cast<std::size_t>(lists.count[h]++);
        lists.pages[at] = page;
        if (group > 1) lists.masks[at] = heads;
      }
    }
    return lists;
  }

  struct one_step {
    bool decode = true;
    int rows = 0;
    step_comparison comparison;  // as it stands before the step
    oracle::step_result want{};
    oracle::attention full{};
  };
  struct live {
    int name = 0;
    std::size_t trace = 0;
    int place = 0;
    bool waits = false;
    oracle::decoder decoder;
    step_comparison comparison{2};
  };

  template <class... T>
  void write(const T&... parts) {
    text_ += sentence(parts...) + "\n";
  }
  live* any() {
    if (live_.empty()) return nullptr;
    live& l = *live_[dice_.below(static_cast<int>(live_.size()))];
    return l.waits ? nullptr : &l;
  }
  std::span<const float> rows(const std::vector<float>& data, const live& l, int count) const {
    const std::size_t row = data.size() / tokens;
    return std::span(data).subspan(static_cast<std::size_t>(l.place) * row,
                                   static_cast<std::size_t>(count) * row);
  }
  void open() {
    const int name = names_++;
    const auto trace = static_cast<std::size_t>(dice_.below(static_cast<int>(traces_.size())));
    live_.push_back(std::make_unique<live>(
        live{.name = name, .trace = trace, .decoder = oracle::decoder(oracle_settings(case_))}));
    expected_[name];
    write("{\"op\":\"open\",\"seq\":", name, ",\"trace\":\"trace", trace, "\"}");
  }
  void fork() {
    live* const l = any();
    if (l == nullptr || live_.size() >= 5) return;
    live_.push_back(std::make_unique<live>(*l));
    live_.back()->name = names_++;
    expected_[live_.back()->name];
    write("{\"op\":\"fork\",\"seq\":", l->name, ",\"child\":", live_.back()->name, "}");
  }
  void truncate() {
    live* const l = any();
    if (l == nullptr) return;
    const int length = dice_.below(2) == 0 ? dice_.below(l->decoder.length() + 1)
                                           : std::max(0, l->decoder.length() - dice_.below(4));
    l->decoder.truncate(length);
    if (!l->decoder.has_selection()) l->comparison.drop();
    write("{\"op\":\"truncate\",\"seq\":", l->name, ",\"length\":", length, "}");
  }
  void wait() {
    for (auto& l : live_) {
      if (dice_.below(3) != 0) continue;
      l->waits = !l->waits;
      write("{\"op\":\"", l->waits ? "preempt" : "restore", "\",\"seq\":", l->name, "}");
    }
    if (live_.size() == 5) {
      write("{\"op\":\"release\",\"seq\":", live_.front()->name, "}");
      live_.erase(live_.begin());
    }
  }
  void prompt() {
    live* const l = any();
    if (l == nullptr) return;
    const int count = std::min(dice_.between(1, 50), tokens - l->place);
    if (count == 0) return;
    l->decoder.prompt(rows(traces_[l->trace].k, *l, count), rows(traces_[l->trace].v, *l, count), count);
    l->place += count;
    l->comparison.drop();
    write("{\"op\":\"prompt\",\"seq\":", l->name, ",\"tokens\":", count, "}");
  }
  void step() {
    std::string listed;
    for (auto& l : live_) {
      if (l->waits || dice_.below(4) == 0) continue;
      const bool decode = dice_.below(6) != 0;
      const int count = std::min(decode ? dice_.between(1, 4) : dice_.between(0, 9), tokens - l->place);
      if (count == 0 && decode) continue;
      listed += sentence(listed.empty() ? "" : ",", "{\"seq\":", l->name, ",\"tokens\":", count,
                         decode ? "}" : ",\"kind\":\"prompt\"}");
      if (count == 0) continue;
      const trace_data& t = traces_[l->trace];
      one_step s{.decode = decode, .rows = count, .comparison = l->comparison};
      if (decode) {
        s.want = l->decoder.step(rows(t.q, *l, count), rows(t.k, *l, count), rows(t.v, *l, count), count);
        l->comparison.follow(s.want);
      } else {
        l->decoder.prompt(rows(t.k, *l, count), rows(t.v, *l, count), count);
        s.full = l->decoder.full(rows(t.q, *l, count).last(6 * head_dim));
        l->comparison.drop();
      }
      l->place += count;
      expected_[l->name].push_back(std::move(s));
    }
    write("{\"op\":\"step\",\"rows\":[", listed, "]}");
  }

  random_case case_;
  dice dice_;
  const std::vector<trace_data>& traces_;
  std::string text_;
  std::vector<std::unique_ptr<live>> live_;
  std::map<int, std::vector<one_step>> expected_;  // by name
  int names_ = 0;
};

}  // namespace

TEST_CASE("replays of random events agree with the float64 oracle", "[events]") {
  const scratch_folder folder;
  const std::vector<trace_data> traces{write_trace(folder / "trace0", 1), write_trace(folder / "trace1", 2)};
  coverage seen;
  for (std::uint64_t seed = 1; seed <= (sanitized ? 8u : 100u); ++seed) {
    const std::string rows = seed % 3 == 0 ? "per_query_head" : seed % 5 == 0 ? "per_layer" : "per_kv_head";
    drawn_events events(seed, traces, rows);
    store(folder / "events", events.file());
    INFO("seed " << seed);
    const program_end end = run_program(with_rows(rows, command(folder / "events", folder / "out")));
    INFO(end);
    REQUIRE(end.exit_code == 0);
    metadata_map metadata;
    const tensor_map got = read_tensors(folder / "out", &metadata);
    CHECK(metadata.at("rows") == (rows == "per_query_head" ? "query_head" : "kv_head"));
    CHECK(metadata.at("unit") == "8");
    try {
      events.compare(got, seen);
    } catch (const disagreement& d) {
      FAIL_CHECK(d.what);
    }
  }
  if (sanitized) return;
  CHECK(seen.steps > 1000);
  CHECK(seen.firm_selections > 300);
  CHECK(seen.firm_own_selections > 50);
  CHECK(seen.recalled > 100);
}

TEST_CASE("events that cannot be are refused with their line and nothing is written", "[events]") {
  const scratch_folder folder;
  write_trace(folder / "trace", 1);
  const std::string open = "{\"op\":\"open\",\"seq\":3,\"trace\":\"trace\"}\n";
  const auto refuse = [&](const std::string& text, const std::vector<std::string>& parts,
                          const std::vector<std::string>& flags = {}) {
    store(folder / "events", text);
    auto all = command(folder / "events", folder / "out");
    for (std::size_t i = 0; i < flags.size(); i += 2) {
      const auto given = std::find(all.begin(), all.end(), flags[i]);
      if (given == all.end())
        all.insert(all.end(), {flags[i], flags[i + 1]});
      else
        given[1] = flags[i + 1];
    }
    INFO(text);
    check_mentions(sentence_of(run_program(all)), parts);
    CHECK_FALSE(std::filesystem::exists(folder / "out"));
  };
  refuse("", {"opens no sequence"});
  refuse("\n\n  \nno\n", {"line 4", "not a JSON object"});
  refuse(open + "[]", {"line 2", "not a JSON object"});
  refuse(open + "{\"seq\":3}", {"line 2", "\"op\""});
  refuse(open + "{\"op\":\"close\",\"seq\":3}", {"line 2", "close", "release"});
  refuse(open + "{\"op\":\"prompt\",\"tokens\":3}", {"line 2", "\"seq\""});
  for (const char* bad : {"-1", "2.5", "\"3\"", "null", "4294967296", "[1]"}) {
    refuse(open + "{\"op\":\"prompt\",\"seq\":3,\"tokens\":" + bad + "}", {"line 2", bad, "whole number"});
    refuse(open + "{\"op\":\"prompt\",\"seq\":" + bad + ",\"tokens\":3}", {"line 2", bad, "whole number"});
  }
  refuse(open + open, {"line 2", "sequence 3 is open already"});
  refuse("{\"op\":\"open\",\"seq\":0,\"trace\":\"no\"}", {"line 1", "no"});
  refuse("{\"op\":\"open\",\"seq\":0,\"trace\":7}", {"line 1", "\"trace\" is 7"});
  refuse(open + "{\"op\":\"prompt\",\"seq\":4,\"tokens\":3}", {"line 2", "sequence 4 is not open"});
  refuse(open + "{\"op\":\"prompt\",\"seq\":3,\"tokens\":161}", {"line 2", "161 rows", "160 left"});
  const std::string some = open + "{\"op\":\"prompt\",\"seq\":3,\"tokens\":100}\n";
  refuse(some + "{\"op\":\"truncate\",\"seq\":3,\"length\":101}", {"line 3", "100 tokens", "101"});
  refuse(some + "{\"op\":\"truncate\",\"seq\":3,\"length\":90}\n{\"op\":\"prompt\",\"seq\":3,\"tokens\":61}",
         {"line 4", "61 rows", "60 left"});
  refuse(some + "{\"op\":\"fork\",\"seq\":3,\"child\":3}", {"line 3", "open already"});
  refuse(some + "{\"op\":\"fork\",\"seq\":5,\"child\":4}", {"line 3", "sequence 5 is not open"});
  refuse(some + "{\"op\":\"restore\",\"seq\":3}", {"line 3", "was not preempted"});
  refuse(some + "{\"op\":\"release\",\"seq\":3}\n{\"op\":\"release\",\"seq\":3}", {"line 4", "not open"});
  const std::string waits = some + "{\"op\":\"preempt\",\"seq\":3}\n";
  refuse(waits + "{\"op\":\"preempt\",\"seq\":3}", {"line 4", "preempted; restore it"});
  refuse(waits + "{\"op\":\"step\",\"rows\":[{\"seq\":3,\"tokens\":1}]}",
         {"line 4", "preempted; restore it"});
  refuse(some + "{\"op\":\"step\",\"rows\":3}", {"line 3", "\"rows\" is 3"});
  refuse(some + "{\"op\":\"step\",\"rows\":[3]}", {"line 3", "not an object"});
  refuse(some + "{\"op\":\"step\",\"rows\":[{\"seq\":3,\"tokens\":1,\"kind\":\"draft\"}]}",
         {"line 3", "draft", "decode or prompt"});
  refuse(some + "{\"op\":\"step\",\"rows\":[{\"seq\":3,\"tokens\":1},{\"seq\":3,\"tokens\":1}]}",
         {"line 3", "listed twice"});
  refuse(some, {"line 2", "13 more pages of the store", "0 of 12"}, {"--store-pages", "12"});
  refuse(some + "{\"op\":\"fork\",\"seq\":3,\"child\":4}", {"line 3", "1 of 1", "--fast-pages"},
         {"--fast-pages", "8"});
  refuse(some, {"--fast-pages 6", "7 slots"}, {"--fast-pages", "6"});
  refuse(some, {"--fast-pages", "none"}, {"--fast-pages", "9", "--route", "in_place"});
  refuse(some, {"--fast-pages", "none"}, {"--fast-pages", "9", "--variant", "full"});
  for (const char* page : {"-100", "0", "12", "2147483647"})
    refuse(some, {"page size", page}, {"--page", page});
  refuse(some + "{\"op\":\"step\",\"rows\":[{\"seq\":3,\"tokens\":1}]}", {"--k 1000000000", "fewer"},
         {"--k", "1000000000"});
  refuse(some, {"--store-pages 0"}, {"--store-pages", "0"});
  store(folder / "events", some);
  for (const char* input : {"events", "trace"})
    check_mentions(sentence_of(run_program(command(folder / "events", folder / input))),
                   {"--out", input, "input"});
  CHECK(load(folder / "events") == some);
  auto both = command(folder / "events", folder / "out");
  both.push_back(folder / "trace");
  check_mentions(sentence_of(run_program(both)), {"--events", "one of the two"});
  check_mentions(sentence_of(run_program({FREEKV_REPLAY, folder / "trace", "--store-pages", "9"})),
                 {"--events"});
}

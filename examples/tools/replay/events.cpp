#include "events.hpp"

#include <algorithm>
#include <array>
#include <freekv/core/size.hpp>
#include <limits>
#include <nlohmann/json.hpp>
#include <sstream>
#include <utility>

#include "choices.hpp"
#include "cited.hpp"
#include "json_text.hpp"
#include "text_file.hpp"

namespace freekv::examples {
namespace {

namespace fs = std::filesystem;
using json = nlohmann::json;

constexpr std::array<std::pair<std::string_view, event::kind>, 8> operations{{
    {"open", event::kind::open},
    {"prompt", event::kind::prompt},
    {"step", event::kind::step},
    {"truncate", event::kind::truncate},
    {"fork", event::kind::fork},
    {"preempt", event::kind::preempt},
    {"restore", event::kind::restore},
    {"release", event::kind::release},
}};

/// Reads line after line, and keeps books of what each sequence has.
class event_reader {
 public:
  event_reader(const fs::path& path, std::optional<data_type> element, bool scale_is_given)
      : path_(path), element_(element), scale_is_given_(scale_is_given) {
    std::istringstream in(read_text_file(path, "name a file of events"));
    for (std::string text; std::getline(in, text);) {
      ++line_;
      if (text.find_first_not_of(" \t\r") != std::string::npos) read(text);
    }
    if (file_.traces.empty())
      throw file_error(cited_path(path) +
                       " opens no sequence; begin with {\"op\":\"open\",\"seq\":0,\"trace\":\"FILE\"}");
  }
  event_file take() { return std::move(file_); }

 private:
  struct books {
    bool open = false, preempted = false;
    std::size_t trace = 0;
    int place = 0, length = 0;  // in the trace; of the sequence
  };

  [[noreturn]] void refuse(const std::string& sentence) const {
    throw choice_error(cited_path(path_) + ", line " + std::to_string(line_) + ": " + sentence);
  }
  const json& field(const json& object, const char* name) const {
    const auto found = object.find(name);
    if (found == object.end()) refuse(std::string("there is no \"") + name + "\"");
    return *found;
  }
  std::string text_of(const json& object, const char* name) const {
    const json& value = field(object, name);
    if (!value.is_string()) refuse(std::string("\"") + name + "\" is " + shown(value) + ", not a text");
    return value.get<std::string>();
  }
  int number_of(const json& object, const char* name) const {
    const json& value = field(object, name);
    if (!value.is_number_integer() || value > json(std::numeric_limits<int>::max()) || value < json(0))
      refuse(std::string("\"") + name + "\" is " + shown(value) + ", not a whole number from 0 on");
    return value.get<int>();
  }
  static std::string shown(const json& value) {
    constexpr std::size_t most = 60;
    const std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
    return std::string(beginning(text, most)) + (text.size() > most ? "..." : "");
  }

  /// Sequences are named by whole numbers; names are made as they are met.
  std::size_t sequence_of(const json& object, const char* name) {
    const std::string text = std::to_string(number_of(object, name));
    const auto found = std::find(file_.names.begin(), file_.names.end(), text);
    if (found != file_.names.end()) return to_size(found - file_.names.begin());
    file_.names.push_back(text);
    books_.emplace_back();
    return file_.names.size() - 1;
  }
  std::string name_of(std::size_t sequence) const { return "sequence " + file_.names[sequence]; }
  books& opened(std::size_t sequence) {
    if (!books_[sequence].open) refuse(name_of(sequence) + " is not open");
    return books_[sequence];
  }
  books& resident(std::size_t sequence) {
    if (opened(sequence).preempted) refuse(name_of(sequence) + " is preempted; restore it first");
    return books_[sequence];
  }
  void begin(std::size_t sequence, const books& as) {
    if (books_[sequence].open) refuse(name_of(sequence) + " is open already");
    books_[sequence] = as;
    const auto open = std::count_if(books_.begin(), books_.end(), [](const books& b) { return b.open; });
    file_.most_sequences = std::max(file_.most_sequences, static_cast<int>(open));
  }

  std::size_t trace_of(const std::string& name) {
    fs::path path = name;
    std::error_code not_there;
    if (path.is_relative() && !fs::exists(path, not_there)) path = path_.parent_path() / path;
    const auto found = std::find(file_.traces.begin(), file_.traces.end(), path);
    if (found != file_.traces.end()) return to_size(found - file_.traces.begin());
    try {
      file_.forms.push_back(read_form(path, element_));
    } catch (const file_error& e) {
      refuse(e.what());
    }
    const trace_form &first = file_.forms.front(), &last = file_.forms.back();
    const bool other_scale =
        !scale_is_given_ && std::abs(last.scale_of_scores() / first.scale_of_scores() - 1) > 1e-6;
    if (last.query_heads != first.query_heads || last.kv_heads != first.kv_heads ||
        last.head_dim != first.head_dim || last.element != first.element || other_scale ||
        last.sink_logits != first.sink_logits || (last.layer && first.layer && last.layer != first.layer))
      refuse(cited_path(path) +
             " has other heads, head_dim, element type, scale, sink logits or layer than " +
             cited_path(file_.traces.front()) + "; the traces of all sequences are of one layer's form");
    file_.traces.push_back(path);
    return file_.traces.size() - 1;
  }

  /// The next `rows.tokens` rows of the sequence's trace.
  void append(const event_rows& rows) {
    books& b = resident(rows.sequence);
    const int left = file_.forms[b.trace].tokens - b.place;
    if (rows.tokens > left)
      refuse(name_of(rows.sequence) + " wants " + std::to_string(rows.tokens) + " rows of " +
             cited_path(file_.traces[b.trace]) + ", which has " + std::to_string(left) + " left");
    b.place += rows.tokens;
    b.length += rows.tokens;
    file_.longest = std::max(file_.longest, b.length);
    if (rows.phase == step_phase::decode)
      file_.most_decode_rows = std::max(file_.most_decode_rows, rows.tokens);
  }
  void read_step(const json& object, event& e) {
    const json& rows = field(object, "rows");
    if (!rows.is_array()) refuse("\"rows\" is " + shown(rows) + ", not a list of objects");
    for (const json& row : rows) {
      if (!row.is_object()) refuse("\"rows\" has " + shown(row) + ", not an object");
      event_rows r{.sequence = sequence_of(row, "seq"), .tokens = number_of(row, "tokens")};
      if (row.contains("kind")) {
        const std::string kind = text_of(row, "kind");
        if (kind != "decode" && kind != "prompt")
          refuse("\"kind\" is " + cited(kind) + ", not decode or prompt");
        if (kind == "prompt") r.phase = step_phase::prefill;
      }
      if (std::any_of(e.rows.begin(), e.rows.end(),
                      [&](const auto& other) { return other.sequence == r.sequence; }))
        refuse(name_of(r.sequence) + " is listed twice in one step");
      append(r);
      e.rows.push_back(r);
    }
  }

  void read(const std::string& text) {
    if (nests_too_deep(text))
      refuse("objects and lists nest deeper than " + std::to_string(deepest_json) +
             " levels; an event has 3 at most");
    const json object = json::parse(text, nullptr, false);
    if (!object.is_object()) refuse("this is not a JSON object");
    const std::string op = text_of(object, "op");
    const auto known =
        std::find_if(operations.begin(), operations.end(), [&](const auto& o) { return o.first == op; });
    if (known == operations.end()) {
      std::string all;
      for (const auto& o : operations) all += (all.empty() ? "" : ", ") + std::string(o.first);
      refuse("\"op\" is " + cited(op) + "; choose among: " + all);
    }
    event e{.what = known->second, .line = line_};
    if (e.what == event::kind::step)
      read_step(object, e);
    else
      e.sequence = sequence_of(object, "seq");
    switch (e.what) {
      case event::kind::open:
        e.other = trace_of(text_of(object, "trace"));
        begin(e.sequence, {.open = true, .trace = e.other});
        break;
      case event::kind::prompt:
        e.rows.push_back({e.sequence, number_of(object, "tokens"), step_phase::prefill});
        append(e.rows.front());
        break;
      case event::kind::step:
        break;
      case event::kind::truncate: {
        e.length = number_of(object, "length");
        books& b = resident(e.sequence);
        if (e.length > b.length)
          refuse(name_of(e.sequence) + " has " + std::to_string(b.length) + " tokens; it cannot keep " +
                 std::to_string(e.length));
        b.length = e.length;
        break;
      }
      case event::kind::fork: {
        e.other = sequence_of(object, "child");
        const books parent = resident(e.sequence);
        begin(e.other, parent);
        break;
      }
      case event::kind::preempt:
        resident(e.sequence).preempted = true;
        break;
      case event::kind::restore:
        if (!opened(e.sequence).preempted) refuse(name_of(e.sequence) + " was not preempted");
        books_[e.sequence].preempted = false;
        break;
      case event::kind::release:
        opened(e.sequence) = {};
        break;
    }
    file_.events.push_back(std::move(e));
  }

  fs::path path_;
  std::optional<data_type> element_;
  bool scale_is_given_;
  int line_ = 0;
  event_file file_;
  std::vector<books> books_;  // by sequence
};

}  // namespace

event_file read_events(const fs::path& path, std::optional<data_type> element, bool scale_is_given) {
  return event_reader(path, element, scale_is_given).take();
}

}  // namespace freekv::examples

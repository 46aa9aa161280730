// The sequences of a pipeline: their lengths, their pages, which of them have slots, and what a step takes up
// from the step before.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/core/error.hpp>
#include <freekv/core/ids.hpp>
#include <freekv/core/shape.hpp>
#include <freekv/core/size.hpp>
#include <freekv/pipeline/stage_arguments.hpp>
#include <freekv/pipeline/step_input.hpp>
#include <freekv/storage/page_pool.hpp>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace freekv {

namespace detail {

class sequence_table;

inline std::string name_of(sequence_id id) { return "sequence " + std::to_string(static_cast<int>(id)); }

/// Record of an open sequence. Throws usage_error.
template <class Record>
const Record& open_record(const std::vector<Record>& records, sequence_id id) {
  const auto index = to_size(id);
  if (index >= records.size() || !records[index].open) throw usage_error(name_of(id) + " is not open");
  return records[index];
}

/// Number of the first sequence that is not open. Throws pool_exhausted.
template <class Record>
int free_record(const std::vector<Record>& records, const char* wanted_for) {
  for (std::size_t i = 0; i < records.size(); ++i)
    if (!records[i].open) return static_cast<int>(i);
  const auto all = static_cast<std::int64_t>(records.size());
  throw pool_exhausted("sequences", all, all, wanted_for, 1);
}

/// Throws usage_error where the sequence of `rows[i]` is listed before it, too.
inline void expect_listed_once(std::span<const step_input> rows, std::size_t i) {
  for (const step_input& before : rows.first(i))
    if (before.sequence == rows[i].sequence)
      throw usage_error(name_of(before.sequence) + " is listed twice in one step");
}

/// Limits of sequences, from the pipeline's settings.
struct sequence_limits {
  int page_tokens = 32;
  int max_tokens = 0;
  int max_sequences = 1;
  int max_resident = 1;
  int max_decode_rows = 1;
  std::int32_t store_pages = 0;
};

}  // namespace detail

/// Complete pages that outlive the sequence they are from, with their summaries; sequences can start with
/// them. They are in use until this goes, which is before its pipeline does.
class prefix {
 public:
  prefix(prefix&& other) noexcept : pool_(other.pool_), pages_(std::exchange(other.pages_, {})) {}
  prefix& operator=(prefix other) noexcept {
    std::swap(pool_, other.pool_);
    std::swap(pages_, other.pages_);
    return *this;
  }
  ~prefix() {
    for (const store_page_id page : pages_) pool_->give_back(page);
  }
  int pages() const { return static_cast<int>(pages_.size()); }

 private:
  friend class detail::sequence_table;
  explicit prefix(detail::page_pool& pool) : pool_(&pool) {}
  detail::page_pool* pool_;
  std::vector<store_page_id> pages_;
};

namespace detail {

/// State of all sequences. A call that throws changes nothing; its `check_` is called before it.
class sequence_table {
 public:
  /// `page_tables` (max_sequences, max pages) and `slot_sets` (max_sequences), which stages read.
  sequence_table(const sequence_limits& limits, std::int32_t* page_tables, std::int32_t* slot_sets)
      : limits_(limits),
        pool_(limits.store_pages),
        page_tables_(page_tables),
        slot_sets_(slot_sets),
        records_(to_size(limits.max_sequences)) {
    std::fill_n(slot_sets, limits.max_sequences, -1);
    for (int set = limits.max_resident; set-- > 0;) free_slot_sets_.push_back(set);
  }

  sequence_table(const sequence_table&) = delete;
  sequence_table& operator=(const sequence_table&) = delete;

  struct record {
    bool open = false;
    int tokens = 0;
    int pages = 0;
    int candidates_at = 1;   ///< the length whose candidates the selection is from
    int decoded_from = 0;    ///< length before the last step, if it decoded
    int kept_row = -1;       ///< row of that step whose queries made the selection; -1: there is no selection
    int decode_steps = 0;    ///< since the last prompt
    int unencoded_from = 0;  ///< first page whose rows are still kept unencoded, where a layer encodes pages
  };

  const record& known(sequence_id id) const { return open_record(records_, id); }
  bool is_resident(sequence_id id) const { return slot_set(id) >= 0; }
  /// -1 while it is preempted, and of a sequence that is not open.
  int slot_set_of(sequence_id id) const { return slot_set(id); }
  std::int32_t free_pages() const { return pool_.available(); }

  sequence_id open() {
    const sequence_id id = next_free("a new sequence");
    record_of(id) = {.open = true};
    take_slot_set(id);
    return id;
  }
  /// Begins with the pages of `start`.
  sequence_id open(const prefix& start) {
    const std::span<const store_page_id> of_start = pages_of(start, "open");
    const int pages = start.pages();
    const sequence_id id = open();
    record& r = record_of(id);
    r.tokens = pages * limits_.page_tokens;
    r.pages = pages;
    r.candidates_at = r.tokens + 1;
    r.unencoded_from = pages;
    for (int page = 0; page < pages; ++page) share(id, page, of_start[to_size(page)]);
    return id;
  }
  void check_fork(sequence_id parent) const {
    known(parent);
    expect_resident("fork", parent);
    next_free("a fork");
  }
  sequence_id fork(sequence_id parent) {
    const record from = known(parent);
    const sequence_id id = next_free("a fork");
    record_of(id) = from;
    take_slot_set(id);
    for (int page = 0; page < from.pages; ++page) share(id, page, page_of(parent, page));
    return id;
  }
  /// The complete pages among the first `tokens` tokens.
  prefix keep(sequence_id id, int tokens) {
    if (const int has = known(id).tokens; tokens < 0 || tokens > has)
      throw usage_error("prefix: " + std::to_string(tokens) + " tokens of " + name_of(id) + ", which has " +
                        std::to_string(has));
    prefix kept(pool_);
    for (int page = 0; page < tokens / limits_.page_tokens; ++page) {
      kept.pages_.push_back(page_of(id, page));
      pool_.share(kept.pages_.back());
    }
    return kept;
  }
  /// `pages` pages without content. Throws pool_exhausted.
  prefix take(int pages) {
    if (pages > limits_.max_tokens / limits_.page_tokens)
      throw pool_exhausted("tokens of a sequence", limits_.max_tokens, 0, "the prefix",
                           long{pages} * limits_.page_tokens, "raise capacity.max_tokens in the settings");
    if (pages > pool_.available())
      throw pool_exhausted("page pool", pool_.capacity(), pool_.capacity() - pool_.available(), "the prefix",
                           pages);
    prefix taken(pool_);
    taken.pages_.reserve(to_size(pages));
    while (taken.pages() < pages) taken.pages_.push_back(pool_.take());
    return taken;
  }
  /// Pages of the store that a prefix has. Throws usage_error where it is another pipeline's.
  std::span<const store_page_id> pages_of(const prefix& kept, const char* call) const {
    if (kept.pool_ != &pool_) throw usage_error(std::string(call) + ": the prefix is of another pipeline");
    return kept.pages_;
  }
  void release(sequence_id id) {
    record& r = record_of(id);
    give_back_from(id, 0);
    if (is_resident(id)) give_back_slot_set(id);
    r = {};
  }
  void check_preemption(sequence_id id) const {
    known(id);
    expect_resident("preempt", id);
  }
  void preempt(sequence_id id) { give_back_slot_set(id); }
  void check_restoration(sequence_id id) const {
    known(id);
    if (is_resident(id)) throw usage_error("restore: " + name_of(id) + " was not preempted");
    expect_slot_set("a restored sequence");
  }
  void restore(sequence_id id) { take_slot_set(id); }

  /// True where the rows of the page that token `tokens` goes to are kept unencoded.
  bool has_rows(sequence_id id, int tokens) const {
    return tokens / limits_.page_tokens >= known(id).unencoded_from;
  }
  /// True where a truncation to `tokens` is inside the last append, so that the selection may stay.
  bool inside_last_append(sequence_id id, int tokens) const {
    const record& r = known(id);
    return r.kept_row >= 0 && tokens > r.decoded_from;
  }
  void check_truncation(sequence_id id, int tokens) const {
    if (const int has = known(id).tokens; tokens < 0 || tokens > has)
      throw usage_error("truncate: " + name_of(id) + " has " + std::to_string(has) +
                        " tokens; it cannot keep " + std::to_string(tokens));
    expect_resident("truncate", id);
  }
  void truncate(sequence_id id, int tokens, bool keeps_selection) {
    record& r = record_of(id);
    const int pages = pages_for(tokens);
    give_back_from(id, pages);
    r.tokens = tokens;
    r.pages = pages;
    r.unencoded_from = std::min(r.unencoded_from, tokens / limits_.page_tokens);
    r.kept_row = keeps_selection ? tokens - r.decoded_from - 1 : -1;
    if (!keeps_selection) r.candidates_at = tokens + 1;
  }

  /// Throws usage_error or pool_exhausted unless there is all that the rows need.
  void check_step(std::span<const step_input> rows, const char* call = "begin_step") const {
    std::int64_t needed = 0;
    const step_input* first_without = nullptr;
    for (std::size_t i = 0; i < rows.size(); ++i) {
      check_rows(call, rows, i);
      needed += pages_needed(rows, i);
      if (first_without == nullptr && needed > pool_.available()) first_without = &rows[i];
    }
    if (first_without != nullptr)
      throw pool_exhausted("page pool", pool_.capacity(), pool_.capacity() - pool_.available(),
                           "the step, from " + name_of(first_without->sequence) + " on,", needed);
  }
  /// Reserves it and makes the step's entries of the rows, in their order, those without tokens left out.
  /// They have been checked.
  void begin_step(std::span<const step_input> rows, std::vector<step_entry>& entries) {
    entries.clear();
    int row = 0;
    for (const step_input& r : rows) {
      if (r.tokens == 0) continue;
      entries.push_back(entry_of(r, row));
      row += r.tokens;
    }
  }

 private:
  record& record_of(sequence_id id) { return records_[to_size(id)]; }
  int pages_for(int tokens) const { return (tokens + limits_.page_tokens - 1) / limits_.page_tokens; }
  std::int32_t* page_entry(sequence_id id, int page) const {
    return page_tables_ + to_size(id) * to_size(pages_for(limits_.max_tokens)) + page;
  }
  store_page_id page_of(sequence_id id, int page) const { return store_page_id{*page_entry(id, page)}; }
  std::int32_t& slot_set(sequence_id id) const { return slot_sets_[to_size(id)]; }

  sequence_id next_free(const char* who) const {
    const sequence_id id{free_record(records_, who)};
    expect_slot_set(who);
    return id;
  }
  void expect_slot_set(const char* who) const {
    if (free_slot_sets_.empty())
      throw pool_exhausted("resident sequences", limits_.max_resident, limits_.max_resident, who, 1,
                           "preempt or release another sequence");
  }
  void expect_resident(const char* call, sequence_id id) const {
    if (!is_resident(id))
      throw usage_error(std::string(call) + ": " + name_of(id) + " is preempted; restore it first");
  }
  void take_slot_set(sequence_id id) {
    slot_set(id) = free_slot_sets_.back();
    free_slot_sets_.pop_back();
  }
  void give_back_slot_set(sequence_id id) { free_slot_sets_.push_back(std::exchange(slot_set(id), -1)); }
  void share(sequence_id id, int page, store_page_id store_page) {
    *page_entry(id, page) = number_of(store_page);
    pool_.share(store_page);
  }
  void give_back_from(sequence_id id, int page) {
    for (int last = known(id).pages; page < last; ++page) pool_.give_back(page_of(id, page));
  }

  void check_rows(const char* call, std::span<const step_input> rows, std::size_t i) const {
    const step_input& r = rows[i];
    const record& sequence = known(r.sequence);
    expect_listed_once(rows, i);
    const bool decodes = r.phase == step_phase::decode;
    if (r.tokens < 0)
      throw usage_error(name_of(r.sequence) + " brings " + std::to_string(r.tokens) +
                        (decodes ? " decode rows" : " prompt rows"));
    if (decodes && r.tokens > limits_.max_decode_rows)
      throw usage_error(name_of(r.sequence) + " brings " + std::to_string(r.tokens) +
                        " decode rows; max_decode_rows in the settings is " +
                        std::to_string(limits_.max_decode_rows));
    expect_resident(call, r.sequence);
    if (r.tokens > limits_.max_tokens - sequence.tokens)
      throw pool_exhausted("tokens of " + name_of(r.sequence), limits_.max_tokens, sequence.tokens,
                           "the step", r.tokens, "raise capacity.max_tokens in the settings");
  }
  /// The page that the next row goes to, where there is one that is not full.
  store_page_id open_page(sequence_id id) const {
    const record& sequence = known(id);
    return sequence.tokens % limits_.page_tokens == 0 ? store_page_id::none : page_of(id, sequence.pages - 1);
  }
  /// A page that others have too is copied before it is written to. Of all that have it the last one writes
  /// to it.
  std::int64_t pages_needed(std::span<const step_input> rows, std::size_t i) const {
    const step_input& r = rows[i];
    if (r.tokens == 0) return 0;
    const record& sequence = known(r.sequence);
    const store_page_id open = open_page(r.sequence);
    const auto leaves_it = [&](const step_input& other) {
      return other.tokens > 0 && open_page(other.sequence) == open;
    };
    const bool copies =
        open != store_page_id::none &&
        pool_.uses(open) -
                std::count_if(rows.begin(), rows.begin() + static_cast<std::ptrdiff_t>(i), leaves_it) >
            1;
    return pages_for(sequence.tokens + r.tokens) - sequence.pages + copies;
  }
  step_entry entry_of(const step_input& r, int first_row) {
    record& sequence = record_of(r.sequence);
    step_entry entry{.sequence = static_cast<int>(r.sequence),
                     .before = sequence.tokens,
                     .tokens = r.tokens,
                     .first_row = first_row,
                     .phase = r.phase};
    if (const store_page_id open = open_page(r.sequence);
        open != store_page_id::none && pool_.uses(open) > 1) {
      entry.shared_page = open;
      *page_entry(r.sequence, sequence.pages - 1) = number_of(pool_.take());
      pool_.give_back(open);  // others have it; whoever writes to it does so after this step's copy
    }
    sequence.tokens += r.tokens;
    for (const int pages = pages_for(sequence.tokens); sequence.pages < pages; ++sequence.pages)
      *page_entry(r.sequence, sequence.pages) = number_of(pool_.take());

    sequence.unencoded_from =
        (r.phase == step_phase::decode ? entry.before : entry.after()) / limits_.page_tokens;
    if (r.phase == step_phase::decode) {
      entry.candidates_at = sequence.candidates_at;
      entry.kept_row = sequence.kept_row;
      entry.decode_step = sequence.decode_steps++;
      sequence.decoded_from = entry.before;
      sequence.kept_row = r.tokens - 1;
    } else {
      sequence.kept_row = -1;
      sequence.decode_steps = 0;
    }
    sequence.candidates_at = sequence.tokens + 1;
    return entry;
  }

  sequence_limits limits_;
  page_pool pool_;
  std::int32_t* page_tables_;
  std::int32_t* slot_sets_;
  std::vector<std::int32_t> free_slot_sets_;
  std::vector<record> records_;
};

}  // namespace detail

}  // namespace freekv

// One KV head of an evicting pipeline: who of its units leaves, at a prompt's end and in a decode step.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <freekv/algorithms/attended_shares.hpp>
#include <freekv/algorithms/copy_slice.hpp>
#include <freekv/algorithms/ordered_key.hpp>
#include <freekv/backend/host/exact_product.hpp>
#include <freekv/backend/host/merge_tokens.hpp>
#include <freekv/backend/host/observe_head.hpp>
#include <freekv/core/size.hpp>
#include <functional>
#include <numeric>

namespace freekv::host {

/// Units of one KV head that leave, and those that stay. By one thread, with its scratch.
template <class Shape, class Settings>
class head_eviction : public head_observer<Shape> {
  using base = head_observer<Shape>;

 public:
  using base::d;
  using typename base::element;
  using typename base::scratch;
  using typename base::state;

  head_eviction(isa instructions, const eviction_sizes& sizes, const Settings& settings)
      : base(instructions, sizes), settings_(&settings) {}

  /// Moment at which `held` tokens of a sequence of `tokens` are there.
  eviction_moment moment(const state& s, const eviction_entry& entry, int head, int tokens, int held) const {
    const int budget =
        s.budgets == nullptr ? settings_->budget : s.budgets[s.head_index(entry.sequence, head)].budget;
    const float ratio = s.ratios == nullptr ? 1.0f : s.ratios[entry.sequence];
    return {budget, entry.prompt, tokens, false, held, s.place, s.places, head, ratio};
  }

  eviction_moment end_of_prompt(const state& s, const eviction_entry& entry, int head) const {
    eviction_moment at = moment(s, entry, head, entry.prompt, entry.prompt);
    at.prompt_ends = true;
    return at;
  }

  /// Cuts a prompt to what the head keeps of it, in the order of the text.
  template <class Eviction>
  void end_prompt(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
                  const scratch& w) const {
    if (s.complete || entry.prompt == 0) return;
    const int u = s.unit_tokens, all = (entry.prompt + u - 1) / u;
    const eviction_moment at = end_of_prompt(s, entry, head);
    int kept = std::min(all, eviction.kept(at) / u);
    bool ranks = kept < all;
    if constexpr (demotes<Eviction>) ranks = ranks || eviction.originals(at) < all;
    prompt_votes votes{w.votes, entry.prompt};
    if constexpr (observes<Eviction>) {
      if (ranks) {
        kept = std::min(kept, eviction.observe(this->see_prompt(eviction, s, entry, at, w), at, w.worths));
      } else {
        std::fill_n(w.worths, all, 0.0f);
      }
    } else if (eviction.observed_rows() == every_prompt_row) {
      votes.shares = s.votes_of(entry, head);
    } else if (eviction.observed_rows() > 0 && ranks) {
      std::fill_n(w.votes, entry.prompt, 0.0f);
      const int end = s.observed_end(entry);
      for (int row = std::max(0, end - s.kept_queries); row < end; ++row)
        this->vote(s, entry, head, row, s.kept_query(entry, row, head), w.votes, w);
    } else {
      std::fill_n(w.votes, entry.prompt, 0.0f);
    }
    const auto make = [&]([[maybe_unused]] auto& made, [[maybe_unused]] int unit) {
      if constexpr (!observes<Eviction>) {
        const int end = std::min((unit + 1) * u, entry.prompt);
        if constexpr (takes_worths<Eviction> || freekv::detail::sees_rows<Eviction>) {
          for (int token = unit * u; token < end; ++token) {
            eviction.on_append(made, token);
            if constexpr (takes_worths<Eviction>) eviction.on_given(made, s.worths_of(entry, head)[token]);
            if constexpr (freekv::detail::sees_rows<Eviction>)
              tell_row(eviction, made, as_const(s.prompt_slice(entry, head)), token);
          }
        } else {
          eviction.on_append(made, end - 1);
        }
        eviction.on_prompt(made, votes, unit * u);
      }
    };
    if constexpr (freekv::detail::ranks_units<Eviction>) {
      auto* const units = reinterpret_cast<typename Eviction::unit_state*>(w.ranked);
      for (int unit = 0; unit < all; ++unit) {
        w.tokens[unit] = unit * u;
        make(units[unit] = {}, unit);
      }
      eviction.rank({all, w.tokens, units}, at, w.worths);
    }
    const auto worth_of = [&](int unit) {
      if constexpr (observes<Eviction> || freekv::detail::ranks_units<Eviction>) {
        return order_bits(w.worths[unit]);
      } else {
        typename Eviction::unit_state made{};
        make(made, unit);
        return eviction.worth(made);
      }
    };
    for (int unit = 0; unit < all; ++unit) w.keys[unit] = rank(eviction, worth_of(unit), unit * u, at);
    std::nth_element(w.keys, w.keys + (all - kept), w.keys + all);
    std::uint64_t* best = w.keys + (all - kept);
    int coded = 0;  // the first of the best, which are the least
    if constexpr (demotes<Eviction>) {
      coded = kept - std::clamp(eviction.originals(at), 0, kept);
      std::nth_element(best, best + coded, best + kept);
    }
    const auto number = [](std::uint64_t key) { return static_cast<std::int32_t>(key & 0xffffffffu); };
    const auto in_text = [&](std::uint64_t a, std::uint64_t b) { return number(a) < number(b); };
    std::sort(best + coded, best + kept, in_text);

    float* const log_weights = s.log_weights(entry.sequence, head);
    if constexpr (merges<Eviction>) {
      std::transform(best, best + kept, w.places, number);
      std::transform(w.keys, best, w.places + kept, number);
      std::sort(w.places + kept, w.places + all);
      std::fill_n(w.log_weights, all, 0.0f);
      const bool by_row = eviction.merge_by() == merge_rule::as_last_row;
      if (kept < all)
        merge(eviction, s, entry, s.prompt_slice(entry, head), nullptr,
              log_weights == nullptr ? nullptr : w.log_weights, kept, all - kept, at,
              by_row ? s.kept_query(entry, s.observed_end(entry) - 1, head) : nullptr, w);
    }
    const auto from = as_const(s.prompt_slice(entry, head));
    const auto to = s.slice(entry.sequence, head);
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    tokens = 0;
    if constexpr (demotes<Eviction>) {
      std::sort(best, best + coded, in_text);
      s.coded[s.head_index(entry.sequence, head)] = tokens = coded;
      for (int i = 0; i < coded; ++i) {
        const int first = number(best[i]), place = s.units - 1 - i;
        encode(eviction, at_row(from, first), s.code(entry.sequence, head, i));
        s.first_tokens(entry.sequence, head)[place] = first;
        if constexpr (!observes<Eviction>)
          make(s.template states_of<Eviction>(entry.sequence, head)[place] = {}, first);
      }
      best += coded;
      kept -= coded;
    }
    for (int i = 0; i < kept; ++i) {
      const int first = number(best[i]), length = std::min(u, entry.prompt - first);
      if (s.staged_rows > 0) copy_slice<d>(at_row(from, first), at_row(to, i * u), length);
      s.first_tokens(entry.sequence, head)[i] = first;
      if (log_weights != nullptr) log_weights[i] = w.log_weights[first];
      if constexpr (!observes<Eviction>)
        make(s.template states_of<Eviction>(entry.sequence, head)[i] = {}, first / u);
      tokens += length;
    }
  }

  /// Cuts what the head holds of a prompt, of which a block has ended, to what it keeps of it.
  template <class Eviction>
  void end_block(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
                 const scratch& w) const {
    if (s.complete || entry.before == 0) return;
    eviction_entry ended = entry;
    ended.prompt = entry.before;
    eviction_moment at = end_of_prompt(s, ended, head);
    at.held = s.tokens[s.head_index(entry.sequence, head)];
    if (at.held > eviction.kept(at)) compact(eviction, s, ended, head, at, nullptr, w);
  }

  /// Tells a policy the key and value of row `at` of a slice, which has just joined a unit.
  template <class Eviction>
  static void tell_row(const Eviction& eviction, typename Eviction::unit_state& unit,
                       const head_slice<const element>& slice, int at) {
    float key[d], value[d];
    for (int x = 0; x < d; ++x) {
      key[x] = to_float(slice.key[at * slice.stride + x]);
      value[x] = to_float(slice.value[at * slice.stride + x]);
    }
    eviction.on_row(unit, key, value, d);
  }

  /// Counts a decode row's shares on the units, once it has attended, and has units leave.
  template <class Eviction>
  void count(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
             const float* queries, const scratch& w) const {
    const int u = s.unit_tokens, row = entry.before;
    const std::size_t first = s.unit_index(entry.sequence, head),
                      at_head = s.head_index(entry.sequence, head);
    std::int32_t& tokens = s.tokens[at_head];
    const int units = (tokens + u - 1) / u;
    const auto place = [&](int unit) {
      if constexpr (demotes<Eviction>)
        return s.place_of(unit, tokens - s.coded[at_head]);
      else
        return unit;
    };
    for (int unit = 0; unit < units; ++unit)
      s.attended[first + to_size(unit)] = s.first_tokens(entry.sequence, head)[place(unit)] / u;
    s.attended_count[at_head] = units;
    if constexpr (demotes<Eviction>) {
      const int coded = s.attended_coded_count[at_head] = s.coded[at_head];
      std::copy_n(s.attended + first + (tokens - coded), coded, s.attended_coded + first);
    }
    const eviction_moment at = moment(s, entry, head, row + 1, tokens);
    const float* const query =
        queries + (std::ptrdiff_t{entry.first_row} * s.heads.kv + head) * s.heads.group() * d;
    if constexpr (observes<Eviction>) {
      if constexpr (demotes<Eviction>) {
        if (s.keeps_decoded) demote(eviction, s, entry, head, at, w);
      } else if constexpr (!freekv::detail::votes_for_layer<Eviction>) {
        if (s.keeps_decoded && tokens > eviction.kept(at)) compact(eviction, s, entry, head, at, query, w);
      }
    } else {
      with_team(this->instructions_, [&](auto team) {
        mean_shares(team, {w.scores, this->score_stride_, w.lse, s.heads.group()}, tokens, w.shares);
      });
      auto* const states = s.template states_of<Eviction>(entry.sequence, head);
      for (int unit = 0; unit < units; ++unit) {
        float share = 0.0f;
        for (int t = unit * u; t < std::min((unit + 1) * u, tokens); ++t) share += w.shares[t];
        eviction.on_attended(states[place(unit)], share, row);
      }
      if constexpr (demotes<Eviction>) {
        demote(eviction, s, entry, head, at, w);
      } else if constexpr (merges<Eviction>) {
        if (tokens > eviction.kept(at)) merge_away(eviction, s, entry, head, at, query, w);
      } else {
        while ((tokens + u - 1) / u > eviction.kept(at) / u) evict(eviction, s, entry, head, at);
      }
    }
  }

 private:
  template <class Element>
  static head_slice<Element> at_row(const head_slice<Element>& slice, int row) {
    return {slice.key + row * slice.stride, slice.value + row * slice.stride, slice.stride};
  }

  /// Larger for what stays longer; all that is protected is above.
  template <class Eviction>
  static std::uint64_t rank(const Eviction& eviction, std::uint32_t worth, int first_token,
                            const eviction_moment& at) {
    if (eviction.protects(first_token, at))
      return ~std::uint64_t{0} << 32 | static_cast<std::uint32_t>(first_token);
    worth = std::min(worth, ~std::uint32_t{0} - 1);
    return std::uint64_t{worth} << 32 | static_cast<std::uint32_t>(first_token);
  }

  /// Places of a KV head's units and their tokens, in the order of the text.
  void order_by_text(const std::int32_t* first_token, int units, const scratch& w) const {
    std::iota(w.order, w.order + units, 0);
    std::sort(w.order, w.order + units, [&](int a, int b) { return first_token[a] < first_token[b]; });
    for (int i = 0; i < units; ++i) w.tokens[i] = first_token[w.order[i]];
  }
  /// Parts places in the order of the text: the `kept` of most `rank_at(i)` first.
  template <class Rank>
  static void part_places(int units, int kept, const Rank& rank_at, const scratch& w) {
    for (int i = 0; i < units; ++i) w.keys[i] = rank_at(i);
    std::nth_element(w.keys, w.keys + (units - kept), w.keys + units);
    int placed = 0;
    for (const bool stays : {true, false})
      for (int i = 0; i < units; ++i)
        if ((kept > 0 && rank_at(i) >= w.keys[units - kept]) == stays) w.places[placed++] = w.order[i];
  }

  /// `merging_tokens::shares`. In double as weights are, so that they depend on nothing but the numbers.
  static const double* share_rows(const state& s, const eviction_entry& entry, const eviction_moment& at,
                                  const merging_tokens& of, const scratch& w) {
    double* const scores = w.merge.logits;
    const typename base::observed_range rows = base::observed_rows(s, entry, at);
    const int group = s.heads.group();
    std::fill_n(w.merge.shares, of.end(), 0.0);
    for (int row = rows.first; row < rows.end; ++row) {
      const float* const queries = s.kept_query(entry, row, at.head);
      std::fill_n(scores, of.end(), -HUGE_VAL);
      for (int i = 0; i < of.end(); ++i)
        for (int g = 0; g < group && of.tokens[i] <= row; ++g)
          scores[i] = std::max(
              scores[i], static_cast<double>(s.scale) * of.product(queries + g * d, of.key(i), d));  // no NaN
      const double most = *std::max_element(scores, scores + of.end());
      if (!std::isfinite(most)) continue;
      double sum = 0.0;
      for (int i = 0; i < of.end(); ++i) sum += scores[i] = std::exp(scores[i] - most);
      for (int i = 0; i < of.end(); ++i) w.merge.shares[i] += scores[i] / sum / rows.count();
    }
    return w.merge.shares;
  }

  /// Tokens of `slice` that leave merge into those that stay, by `w.places`. `first_token` is by place, null
  /// where places are tokens; `log_weights` by place, or null.
  template <class Eviction>
  void merge(const Eviction& eviction, const state& s, const eviction_entry& entry,
             const head_slice<element>& slice, const std::int32_t* first_token, float* log_weights,
             int staying, int leaving, const eviction_moment& at, const float* query,
             const scratch& w) const {
    const int all = staying + leaving;
    const auto product = exact_product_of(this->instructions_);
    this->load_keys(slice, w.places, all, w.unit_keys);
    for (int i = 0; i < all; ++i) {
      const float* const key = w.unit_keys + std::ptrdiff_t{i} * d;
      w.tokens[i] = first_token == nullptr ? w.places[i] : first_token[w.places[i]];
      w.merge.lengths[i] = std::sqrt(product(key, key, d));
      w.merge.fates[i] = {};
    }
    merging_tokens of{staying, leaving, w.tokens, w.unit_keys, w.merge.lengths,
                      d,       product, nullptr,  w.merge.next};
    if constexpr (observes<Eviction>)
      if (eviction.merge_by() == merge_rule::by_shares) of.shares = share_rows(s, entry, at, of, w);
    eviction.merge(of, at, s.template memory_of<Eviction>(entry.sequence, at.head), w.merge.fates);
    token_merger<d, element>{of,
                             slice,
                             w.places,
                             log_weights,
                             eviction.merge_by(),
                             query,
                             s.heads.group(),
                             static_cast<double>(s.scale),
                             w.merge}
        .merge_all();
  }

  /// Moves a token to another place, and what is known of it but a policy's state.
  static void move_token(const head_slice<element>& slice, std::int32_t* first_token, float* log_weights,
                         int from, int to) {
    if (from == to) return;
    copy_slice<d>(at_row(as_const(slice), from), at_row(slice, to), 1);
    first_token[to] = first_token[from];
    if (log_weights != nullptr) log_weights[to] = log_weights[from];
  }

  /// All at once the units leave that are not kept, and merge into the others; the last ones take their
  /// places.
  template <class Eviction>
  void merge_away(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
                  const eviction_moment& at, const float* query, const scratch& w) const {
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    std::int32_t* const first_token = s.first_tokens(entry.sequence, head);
    float* const log_weights = s.log_weights(entry.sequence, head);
    auto* const states = s.template states_of<Eviction>(entry.sequence, head);
    const auto slice = s.slice(entry.sequence, head);
    const int all = tokens, kept = eviction.kept(at);
    order_by_text(first_token, all, w);
    part_places(
        all, kept, [&](int i) { return rank(eviction, eviction.worth(states[w.order[i]]), w.tokens[i], at); },
        w);
    merge(eviction, s, entry, slice, first_token, log_weights, kept, all - kept, at, query, w);
    std::sort(w.places + kept, w.places + all, std::greater<std::int32_t>());
    for (int i = kept; i < all; ++i) {
      const int to = w.places[i], from = --tokens;
      move_token(slice, first_token, log_weights, from, to);
      states[to] = states[from];
    }
  }

  /// All at once those leave that an observing policy does not keep; the others move up, in the order of
  /// their places.
  template <class Eviction>
  void compact(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
               const eviction_moment& at, const float* query, const scratch& w) const {
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    std::int32_t* const first_token = s.first_tokens(entry.sequence, head);
    float* const log_weights = s.log_weights(entry.sequence, head);
    const auto slice = s.slice(entry.sequence, head);
    order_by_text(first_token, tokens, w);
    const int kept = std::min(
        {tokens, eviction.kept(at),
         eviction.observe(this->see(eviction, s, entry, slice, log_weights, tokens, at, w), at, w.worths)});
    part_places(
        tokens, kept, [&](int i) { return rank(eviction, order_bits(w.worths[i]), w.tokens[i], at); }, w);
    if constexpr (merges<Eviction>)
      merge(eviction, s, entry, slice, first_token, log_weights, kept, tokens - kept, at, query, w);
    std::sort(w.places, w.places + kept);
    for (int i = 0; i < kept; ++i) move_token(slice, first_token, log_weights, w.places[i], i);
    tokens = kept;
  }

  /// The bytes of a token, the first of a slice.
  template <class Eviction>
  static void encode(const Eviction& eviction, const head_slice<const element>& token, std::byte* to) {
    eviction.codec().template encode<d>(scalar_team{}, token, 1, to);
  }

  /// All at once tokens leave, and become coded of those that stay, where there are more than the policy
  /// keeps or keeps original. Originals move up to the front, coded ones to the end, both in the order of
  /// their places; those that are new wait in scratch, since there may be no room before the others have
  /// moved.
  template <class Eviction>
  void demote(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
              const eviction_moment& at, const scratch& w) const {
    const std::size_t at_head = s.head_index(entry.sequence, head);
    std::int32_t &tokens = s.tokens[at_head], &coded = s.coded[at_head];
    const int all = tokens, whole = all - coded;
    if (all <= eviction.kept(at) && whole <= eviction.originals(at)) return;
    std::int32_t* const first_token = s.first_tokens(entry.sequence, head);
    const auto slice = s.slice(entry.sequence, head);
    for (int nth = 0; nth < all; ++nth) w.held[nth] = first_token[s.place_of(nth, whole)];
    constexpr bool together = observes<Eviction> || freekv::detail::ranks_units<Eviction>;
    if constexpr (together) {
      order_by_text(w.held, all, w);
    } else {
      std::iota(w.order, w.order + all, 0);
      std::copy_n(w.held, all, w.tokens);
    }
    int kept = std::min(all, eviction.kept(at));
    if constexpr (observes<Eviction>)
      kept = std::min(kept, eviction.observe(this->see(eviction, s, entry, slice, nullptr, all, at, w, coded),
                                             at, w.worths));
    if constexpr (freekv::detail::ranks_units<Eviction>) {
      auto* const units = reinterpret_cast<typename Eviction::unit_state*>(w.ranked);
      for (int i = 0; i < all; ++i)
        units[i] = s.template states_of<Eviction>(entry.sequence, head)[s.place_of(w.order[i], whole)];
      eviction.rank({all, w.tokens, units}, at, w.worths);
    }
    const auto rank_at = [&](int i) {
      if constexpr (together) {
        return rank(eviction, order_bits(w.worths[i]), w.tokens[i], at);
      } else {
        const auto* const states = s.template states_of<Eviction>(entry.sequence, head);
        return rank(eviction, eviction.worth(states[s.place_of(w.order[i], whole)]), w.tokens[i], at);
      }
    };

    // By place: 0 leaves, 1 stays as it is, 2 becomes coded.
    std::fill_n(w.places, all, 0);
    for (int i = 0; i < all; ++i) w.keys[i] = rank_at(i);
    std::nth_element(w.keys, w.keys + (all - kept), w.keys + all);
    const std::uint64_t least_kept = kept > 0 ? w.keys[all - kept] : 0;
    int originals = 0;  // that stay, so or to be coded
    for (int i = 0; kept > 0 && i < all; ++i) {
      const std::uint64_t key = rank_at(i);
      w.places[w.order[i]] = key >= least_kept;
      if (key >= least_kept && w.order[i] < whole) w.keys[originals++] = key;
    }
    const int become = originals - std::clamp(eviction.originals(at), 0, originals);
    std::nth_element(w.keys, w.keys + become, w.keys + originals);
    for (int i = 0; become > 0 && i < all; ++i)
      if (const std::uint64_t key = rank_at(i);
          w.order[i] < whole && key >= least_kept && (become == originals || key < w.keys[become]))
        w.places[w.order[i]] = 2;

    std::byte* const states = s.states + s.unit_index(entry.sequence, head) * s.state_bytes;
    const auto state_at = [&](std::byte* of, int nth) { return of + to_size(nth) * s.state_bytes; };
    const auto move_known = [&](int from, int to) {
      first_token[to] = first_token[from];
      if constexpr (!observes<Eviction>)
        std::memcpy(state_at(states, to), state_at(states, from), s.state_bytes);
    };
    int stay = 0, wait = 0;
    for (int nth = 0; nth < whole; ++nth) {
      if (w.places[nth] == 2) {
        encode(eviction, at_row(as_const(slice), nth), w.codes + to_size(wait) * s.code_bytes);
        w.held[wait] = first_token[nth];
        if constexpr (!observes<Eviction>)
          std::memcpy(state_at(w.states, wait), state_at(states, nth), s.state_bytes);
        ++wait;
      }
      if (w.places[nth] != 1) continue;
      if (nth != stay) {
        copy_slice<d>(at_row(as_const(slice), nth), at_row(slice, stay), 1);
        move_known(nth, stay);
      }
      ++stay;
    }
    int still = 0;
    for (int nth = 0; nth < coded; ++nth) {
      if (w.places[whole + nth] == 0) continue;
      if (nth != still) {
        std::memcpy(s.code(entry.sequence, head, still), s.code(entry.sequence, head, nth), s.code_bytes);
        move_known(s.units - 1 - nth, s.units - 1 - still);
      }
      ++still;
    }
    for (int i = 0; i < wait; ++i, ++still) {
      std::memcpy(s.code(entry.sequence, head, still), w.codes + to_size(i) * s.code_bytes, s.code_bytes);
      first_token[s.units - 1 - still] = w.held[i];
      if constexpr (!observes<Eviction>)
        std::memcpy(state_at(states, s.units - 1 - still), state_at(w.states, i), s.state_bytes);
    }
    coded = still;
    tokens = stay + still;
  }

  /// The unit of least rank leaves, but never one that is being filled. Its place is the last full one's, and
  /// that one's is the open one's: full units stay in front.
  template <class Eviction>
  void evict(const Eviction& eviction, const state& s, const eviction_entry& entry, int head,
             const eviction_moment& at) const {
    const int u = s.unit_tokens;
    std::int32_t& tokens = s.tokens[s.head_index(entry.sequence, head)];
    const int units = (tokens + u - 1) / u, open = tokens % u, full = open > 0 ? units - 1 : units;
    std::int32_t* const first_token = s.first_tokens(entry.sequence, head);
    auto* const states = s.template states_of<Eviction>(entry.sequence, head);
    int leaves = 0;
    std::uint64_t least = ~std::uint64_t{0};
    for (int unit = 0; unit < full; ++unit)
      if (const std::uint64_t key = rank(eviction, eviction.worth(states[unit]), first_token[unit], at);
          key < least)
        least = key, leaves = unit;
    const auto slice = s.slice(entry.sequence, head);
    const auto move = [&](int from, int to, int length) {
      if (from == to) return;
      copy_slice<d>(at_row(as_const(slice), from * u), at_row(slice, to * u), length);
      first_token[to] = first_token[from];
      states[to] = states[from];
    };
    move(full - 1, leaves, u);
    if (open > 0) move(full, full - 1, open);
    tokens -= u;
  }

  const Settings* settings_;
};

}  // namespace freekv::host

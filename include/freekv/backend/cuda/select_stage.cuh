// Selection and recall in a step on a device: which launches they are.
#pragma once

#include <algorithm>
#include <cstdint>
#include <freekv/backend/cuda/append.cuh>
#include <freekv/backend/cuda/cuda_backend.cuh>
#include <freekv/backend/cuda/keep_best.cuh>
#include <freekv/backend/cuda/pin_units.cuh>
#include <freekv/backend/cuda/pool.cuh>
#include <freekv/backend/cuda/recall.cuh>
#include <freekv/backend/cuda/recall_by_copies.cuh>
#include <freekv/backend/cuda/score.cuh>
#include <freekv/backend/cuda/select.cuh>
#include <freekv/backend/cuda/select_by_layer.cuh>
#include <freekv/backend/cuda/selection_scratch.cuh>
#include <freekv/backend/cuda/step_upload.cuh>
#include <freekv/core/error.hpp>
#include <freekv/core/policy.hpp>
#include <freekv/core/size.hpp>
#include <freekv/policies/any_of.hpp>
#include <freekv/policies/coarse_to_fine.hpp>
#include <freekv/policies/correction.hpp>
#include <freekv/policies/pinning.hpp>
#include <freekv/policies/plan.hpp>
#include <freekv/policies/scope.hpp>
#include <span>
#include <string>
#include <type_traits>

namespace freekv::device {

/// True of a policy that is chosen at run time.
template <class Policy>
inline constexpr bool is_chosen = false;
template <class... Policies>
inline constexpr bool is_chosen<any_of<Policies...>> = true;

/// The heads that are flagged select for this step and recall before it attends, on the compute stream; every
/// head selects for the next step and recalls, on the recall stream. With scratch for each of the two.
template <class State, class Settings, class Backend, class Recall, class Copies>
class selection_stage {
 public:
  static constexpr int d = State::head_dim;

  selection_stage(Backend& of, const Settings& settings, carver& page_locked, carver& fast)
      : backend_(&of), settings_(&settings) {
    int row_units = 0, max_selected = 0;
    for (int layer = 0; layer < settings.model.layers; ++layer) {
      row_units = std::max(row_units, settings.budget_at(layer).selected_units + settings.pinned_units());
      max_selected = std::max(max_selected, settings.max_selected(layer));
    }
    const bool by_query_head = settings.selects_by() == selection_scope::query_head;
    const selection_sizes sizes{
        .entries = settings.capacity.max_resident,
        .kv_heads = settings.model.kv_heads,
        .by_query_head = by_query_head,
        .selecting = by_query_head ? settings.model.group() : 1,
        .queries = (by_query_head ? 1 : settings.model.group()) * settings.capacity.max_decode_rows,
        .max_units = settings.max_units(),
        .row_units = row_units,
        .max_selected = max_selected,
        .head_dim = d,
        .query_width =
            resolve(settings.summary, [](const auto& summary) { return summary_query_width(summary, d); }),
        .one_selection_per_layer = settings.selects_by() == selection_scope::layer,
        .two_stages = resolve(settings.summary, []<class S>(const S&) { return two_stage_summary<S>; }),
        .multiprocessors = multiprocessors(),
        .shared_bytes = most_shared_bytes()};
    for (selection_scratch* scratch : {&correct_, &speculate_})
      *scratch = selection_scratch::carve(fast, sizes);
    if (of.transfers() != nullptr && settings.route.keeps_slots())
      copies_ = copied_recall<State, Copies>(
          std::int64_t{settings.capacity.max_resident} * settings.model.kv_heads * max_selected,
          settings.unit_tokens(), page_locked, fast);
  }

  /// Throws settings_error for what a device does not select by.
  static void check(const Settings& settings) {
    constexpr int most_heads = (48 << 10) / static_cast<int>(sizeof(float));  // of a block's memory
    if (const int heads = settings.model.group() * settings.capacity.max_decode_rows; heads > most_heads)
      throw settings_error("query heads of a group times max_decode_rows are " + std::to_string(heads) +
                           "; a device pools at most " + std::to_string(most_heads));
    if (drift_floats(settings.model.group(), d) > most_drift_floats)
      throw settings_error("query heads of a group times head_dim are " +
                           std::to_string(settings.model.group() * d) +
                           "; a device judges the drift of at most " + std::to_string(most_drift_floats / 2) +
                           " numbers of a KV head");
    resolve(settings.selection, [&]<class Selection>(const Selection&) {
      constexpr bool by_mass = selection_by_mass<Selection>;
      constexpr int most = by_mass ? block_selection_default.most_by_mass : most_favoured;
      for (int layer = 0; (by_mass || favours_held<Selection>)&&layer < settings.model.layers; ++layer)
        if (const int k = settings.budget_at(layer).selected_units; k > most)
          throw settings_error("selected_units is " + std::to_string(k) + "; a selection " +
                               (by_mass ? "by mass" : "that favours held units") +
                               " on a device chooses at most " + std::to_string(most));
    });
  }

  /// `layers`: as the host last read them, for copy engines.
  void begin(std::span<const State> layers) {
    layers_ = layers;
    for (const selection_scratch& scratch : {correct_, speculate_}) scratch.clear(backend_->compute().get());
  }

  /// The flagged heads select with the current query and recall what they miss; then every head's selection
  /// is what this step attends to. A correction by mass scores all heads to find the flagged ones; else what
  /// no head is flagged for ends at once.
  void correct(const State& s, const step_view& step) {
    resolve(settings_->correction, [&]<class Correction>(const Correction& correction) {
      if constexpr (correction_by_mass<Correction>)
        select(s, step, correct_, {.time = selection_time::correct, .every_head = true},
               correction.at(s.layer), backend_->compute());
      else
        select(s, step, correct_, {selection_time::correct}, already_flagged{}, backend_->compute());
    });
  }
  /// Every head selects with the current query for the next step and recalls what it misses, on the recall
  /// stream.
  void speculate(const State& s, const step_view& step) {
    select(s, step, speculate_, {selection_time::speculate}, already_flagged{}, backend_->recall());
  }

 private:
  using selection_type = decltype(Settings::selection);
  using residency_type = decltype(Settings::residency);
  using codec_type = decltype(Settings::codec);
  static constexpr bool policies_are_fixed =
      !is_chosen<decltype(Settings::summary)> && !is_chosen<residency_type> && !is_chosen<codec_type> &&
      !is_chosen<decltype(Settings::pooling)> && !is_chosen<decltype(Settings::selection)> &&
      !is_chosen<decltype(Settings::correction)> && !two_stage_summary<decltype(Settings::summary)> &&
      std::is_same_v<decltype(Settings::scope), per_kv_head>;

  template <class Correction>
  void select(const State& s, const step_view& step, const selection_scratch& scratch, selection_job job,
              const Correction& correction, device::stream& on) {
    if (s.kind != layer_kind::retrieval) return;
    device::stream* const transfers = s.keeps_slots ? backend_->transfers() : nullptr;
    if (transfers != nullptr) expect_no_capture(on);
    const cudaStream_t stream = on.get();
    resolve(settings_->pinning, [&]<class Pinning>(const Pinning&) {
      if constexpr (!std::is_same_v<Pinning, no_pins>)
        if (s.pins > 0 && job.time == selection_time::correct) launch_pin_units(s, step, job, stream);
    });
    // A correction by mass, which asks every head, needs scores even where all candidates could be selected.
    if (!job.every_head)
      job.select_all_up_to = resolve(settings_->selection, [&](const auto& selection) {
        return all_selected_up_to(selection, s.budget.selected_units);
      });
    if constexpr (policies_are_fixed) return select_at_once(s, step, scratch, job, correction, on, transfers);
    resolve(settings_->selection, [&](const auto& selection) {
      resolve(settings_->scope, [&]<class Scope>(const Scope&) {
        constexpr bool together = Scope::scope == selection_scope::layer;
        job.one_selection_per_layer = together;
        if constexpr (together)
          if (job.time == selection_time::correct) launch_flag_layer(s, step, stream);
        resolve(settings_->summary, [&](const auto& summary) {
          resolve(settings_->pooling, [&]<class Pooling>(const Pooling& pooling) {
            score(s, summary, pooling, step, scratch, job, stream);
            if constexpr (together) launch_pool_heads<Pooling>(s, step, scratch, job, stream);
          });
        });
      });
      const auto select_units = [&](const auto& from) {
        resolve(settings_->residency, [&](const auto& residency) {
          launch_select(s, from, residency, correction, step, scratch, job, stream);
        });
      };
      resolve(settings_->scope, [&]<class Scope>(const Scope&) {
        if constexpr (Scope::scope == selection_scope::query_head) {
          // checked_settings refuses a correction by mass.
          if constexpr (std::is_same_v<Correction, already_flagged>) {
            launch_select_by_query_head(s, selection, step, scratch, job, stream);
            select_units(union_of_query_heads{});
          }
        } else {
          select_units(selection);
        }
      });
    });
    recall(s, step, scratch, on, transfers);
  }
  /// Recalls what has been listed, by copy engines where these transfer.
  void recall(const State& s, const step_view& step, const selection_scratch& scratch, device::stream& on,
              device::stream* transfers) {
    if (!s.keeps_slots) return;
    if (transfers != nullptr)
      copies_.recall(s, layers_[to_size(s.layer)], scratch, on, *transfers);
    else
      resolve(settings_->codec,
              [&](const auto& codec) { launch_recall<Recall>(s, codec, step, scratch, on.get()); });
  }
  /// Selects where nothing is chosen at run time, in the block that pools last of a head's scores. To correct
  /// in scoring's launch, which ends at once where nothing is flagged, and recalls what a head misses. To
  /// speculate in a launch of its own: many blocks pool, and each loads little code beside its own.
  template <class Correction>
  void select_at_once(const State& s, const step_view& step, const selection_scratch& scratch,
                      const selection_job& job, const Correction& correction, device::stream& on,
                      device::stream* transfers) {
    const auto then = [&]<class By>(const By& recall) {
      return select_and_recall<selection_type, residency_type, Correction, By>{
          settings_->selection, settings_->residency, correction, recall};
    };
    const auto score = [&](const auto& behind) {
      launch_score<scoring::alone>(s, settings_->summary, settings_->pooling, step, scratch, job, on.get(),
                                   behind);
    };
    const bool corrects = job.time == selection_time::correct;
    if constexpr (Recall::tuning.read == recall_read::loads) {
      if (corrects && transfers == nullptr) return score(then(recall_now<codec_type>{settings_->codec}));
    } else {
      if (corrects) {
        score(then(recall_later{}));
        return recall(s, step, scratch, on, transfers);
      }
    }
    score(pools_apart{});
    launch_pool(s, settings_->pooling, step, scratch, job, on.get(), then(recall_later{}));
    recall(s, step, scratch, on, transfers);
  }

  /// Scores in one stage; or in two, of which the second scores what the first has kept.
  template <class Summary, class Pooling>
  static void score(const State& s, const Summary& summary, const Pooling& pooling, const step_view& step,
                    const selection_scratch& scratch, const selection_job& job, cudaStream_t stream) {
    if constexpr (two_stage_summary<Summary>) {
      selection_job coarse = job, fine = job;
      coarse.select_all_up_to = std::max(
          job.select_all_up_to, summary.kept(s.max_pages * s.units_per_page, s.budget.selected_units));
      fine.separate_next_scores = true;
      launch_score<scoring::coarse>(s, summary, pooling, step, scratch, coarse, stream);
      launch_keep(s, summary, step, scratch, coarse, stream);
      launch_score<scoring::fine>(s, summary, pooling, step, scratch, fine, stream);
    } else {
      launch_score<scoring::alone>(s, summary, pooling, step, scratch, job, stream);
    }
  }

  Backend* backend_;
  const Settings* settings_;
  std::span<const State> layers_;          // as the host last read them
  selection_scratch correct_, speculate_;  // of the compute and of the recall stream
  copied_recall<State, Copies> copies_;    // where copy engines recall
};

}  // namespace freekv::device

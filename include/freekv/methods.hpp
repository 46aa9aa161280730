// The table of methods, published ones and ours: `methods::quest::pipeline<kv_shape<half, 128>>`. Programs'
// names, `--variant` and the table of docs/policies.md are made from it. Values that a method gives at run
// time are members under the setting's name, which `give_values<methods::twilight>(settings)` hands on.
#pragma once

#include <freekv/backend/host/evict.hpp>
#include <freekv/backend/host/host_backend.hpp>
#include <freekv/backend/host/stages.hpp>
#include <freekv/pipeline/evicting_pipeline.hpp>
#include <freekv/pipeline/retrieval_pipeline.hpp>
#include <freekv/policies/counting_eviction.hpp>
#include <freekv/policies/given_eviction.hpp>
#include <freekv/policies/hard_kv.hpp>
#include <freekv/policies/merging_eviction.hpp>
#include <freekv/policies/window_eviction.hpp>
#include <string_view>

namespace freekv {

/// A named list of policies.
template <policy... Policies>
struct named_policies {
  using pack = policy_pack_of<Policies...>;
  /// The pipeline for a shape; `More` are added (page size, route), one of each kind at most.
  template <class Shape, policy... More>
  using pipeline = retrieval_pipeline<Shape, Policies..., More...>;
};

/// A named policy that forgets.
template <policy Eviction>
struct named_eviction {
  using eviction = Eviction;
  /// The pipeline for a shape; `Backend` is the host's unless named.
  template <class Shape, class... Backend>
  using pipeline = evicting_pipeline<Shape, Eviction, Backend...>;
};

/// Gives settings of a method's pipeline the values that it is published with, such as twilight's share of
/// 0.85 or the delta of `freekv_key_codes_sticky`; its type has the policies alone, with their own defaults.
template <class Method, class Settings>
void give_values(Settings& settings) {
  if constexpr (requires { Method::selection; }) settings.selection = Method::selection;
  if constexpr (requires { Method::correction; }) settings.correction = Method::correction;
}

/// Methods: each has its name, what it does in a sentence, and where it was published, nothing for ours.
namespace methods {

/// Full attention: everything is kept and attended to.
struct full : named_policies<every_layer<layer_kind::complete>> {
  static constexpr std::string_view name = "full";
  static constexpr std::string_view about = "everything is kept and attended to";
  static constexpr std::string_view published = "";
};
/// StreamingLLM (arXiv 2309.17453): sink and window alone.
struct streaming_llm : named_policies<every_layer<layer_kind::window>> {
  static constexpr std::string_view name = "streaming_llm";
  static constexpr std::string_view about = "sink and window alone";
  static constexpr std::string_view published = "arXiv 2309.17453";
};
/// Quest (arXiv 2406.10774), selecting for whole groups as FreeKV's comparison has it: min-max summaries, a
/// page's score the largest of the group's, selected anew before every attention.
struct quest : named_policies<min_max, max_score, always> {
  static constexpr std::string_view name = "quest";
  static constexpr std::string_view about =
      "min-max summaries, a group's pages by the largest score, anew before every attention";
  static constexpr std::string_view published = "arXiv 2406.10774";
};
/// Quest's summaries and moments with FreeKV's pooling, which is FreeKV corrected in every step: beside quest
/// it shows what the pooling does, beside freekv what the correction does. Results from before quest pooled
/// by max_score have it under that name.
struct quest_mean_softmax : named_policies<min_max, always> {
  static constexpr std::string_view name = "quest_mean_softmax";
  static constexpr std::string_view about = "quest with FreeKV's pooling";
  static constexpr std::string_view published = "";
};
/// Quest as published, without groups: each query head selects its own pages.
struct quest_per_query_head : named_policies<min_max, per_query_head, always> {
  static constexpr std::string_view name = "quest_per_query_head";
  static constexpr std::string_view about = "each query head selects its own pages";
  static constexpr std::string_view published = "arXiv 2406.10774";
};
/// ArkVale (NeurIPS 2024): boxes as wide as the keys' mean distance from their centre, scores averaged over
/// the group, selected anew before every attention.
struct arkvale : named_policies<centroid_box, mean_score, always> {
  static constexpr std::string_view name = "arkvale";
  static constexpr std::string_view about = "boxes as wide as the keys' mean distance from their centre";
  static constexpr std::string_view published = "NeurIPS 2024";
};
/// Twilight (arXiv 2502.02770, section 4), Quest as the algorithm that it prunes: min-max summaries keep 4 k
/// of the candidates, keys in 4 bits estimate these pages' masses, and of the k best the fewest are selected
/// that have 0.85 of the kept pages' mass, with its `selection`; selected anew before every attention. Unlike
/// the paper's, the masses are of pages and groups, not of tokens, selected pages are attended to whole, k
/// bounds them, sink and window are always there, and the 4 bits are of a key's difference from its page's
/// mean.
struct twilight : named_policies<coarse_to_fine<min_max, key_sketch<4>>, top_p, always> {
  static constexpr std::string_view name = "twilight";
  static constexpr std::string_view about =
      "a second, finer summary of the best pages, and the fewest of them that have 0.85 of the mass";
  static constexpr std::string_view published = "arXiv 2502.02770";
  static constexpr top_p selection{.p = 0.85f};
};
/// InfiniGen (arXiv 2406.19707, section 4), as far as keys and queries alone allow: single tokens are
/// selected by partial keys, here the unquantised coefficients of a key in the 24 dimensions where the
/// prompt's keys vary most; selected anew before every attention. Unlike the paper's, these dimensions come
/// from keys, not from skewed weights, the query is the layer's own, not one foreseen from the layer before,
/// k bounds the tokens instead of a distance from the best score, query heads of a group select together, and
/// sink and window are always there.
struct infinigen : named_policies<unit<1>, key_subspace<24, 32>, always> {
  static constexpr std::string_view name = "infinigen";
  static constexpr std::string_view about = "single tokens by partial keys";
  static constexpr std::string_view published = "arXiv 2406.19707";
};
/// FASA (Frequency-aware Sparse Attention, 2026): single tokens are selected by the numbers of those rotary
/// pairs whose scores alone agree best with whole scores on which tokens are the best, as rows of the
/// summary's basis; 12 pairs here, unquantised, and selected anew before every attention. Unlike the paper's,
/// pairs are a KV head's, and programs choose them by the last rows of the prompt instead of offline; query
/// heads of a group select together, k bounds the tokens, and sink and window are always there.
struct fasa : named_policies<unit<1>, key_subspace<24, 32>, always> {
  static constexpr std::string_view name = "fasa";
  static constexpr std::string_view about = "single tokens by the rotary pairs that tell most";
  static constexpr std::string_view published = "2026";
  static constexpr bool basis_of_pairs = true;
};
/// ClusterKV (arXiv 2412.03213): single tokens are selected by the clusters that their keys are in, which are
/// found among the prompt's keys, one for 80 tokens, whole clusters by the largest product
/// of the group's queries with their centroids, as in quest, anew before every attention. Unlike the paper's,
/// a token that is decoded joins the cluster nearest to it, where there 320 of them make four of their own,
/// and sink and window are always there. In the paper query heads have no groups; the published code has the
/// mean of their queries as an option, with which KL is larger here.
struct clusterkv : named_policies<unit<1>, key_clusters, max_score, always> {
  static constexpr std::string_view name = "clusterkv";
  static constexpr std::string_view about = "single tokens by clusters of the prompt's keys";
  static constexpr std::string_view published = "arXiv 2412.03213";
};
/// MagicPIG (arXiv 2410.16179, section 4): each query head samples the tokens that collide with it in 2 or
/// more of 150 hash tables of 10 random signs, of keys less their mean, and attention weighs each by the
/// inverse of the probability of that; sink and window are attended to as they are. k bounds the sample,
/// where in the paper it has no bound: choose one that it does not reach. Also unlike the paper's, the mean
/// is of the prompt's keys or another text's and stays as it is, each KV head has hyperplanes of its own, and
/// tokens are compared by their codes, where there a table lists those of each code. There some layers keep
/// everything: choose a plan with such layers.
struct magicpig : named_policies<unit<1>, key_signatures<>, max_score, colliding, per_query_head, always> {
  static constexpr std::string_view name = "magicpig";
  static constexpr std::string_view about =
      "each query head samples tokens by hash collisions, weighed by the inverse of their probability";
  static constexpr std::string_view published = "arXiv 2410.16179";
};
/// MPCache (arXiv 2501.06807): three tenths of a prompt's tokens are kept, by `thin_prompt`, and then those
/// boxes of 16 keys are selected that the group's queries score best, anew before every attention. The caller
/// thins the prompt to `prompt_share` before it is appended. As its code is published the share is what a
/// threshold leaves on average (0.3 for HotpotQA), a box's score is the product of the query with 0.6 of its
/// upper corner and 0.4 of its lower, which spares a comparison of encrypted numbers and is no bound, and
/// boxes of 32 keys are scored first, of which the better half's are; here the score is the bound that this
/// stands for, as in quest, and all boxes of 16 are scored. Also unlike the paper's, KV heads keep tokens of
/// their own, k bounds what is selected, not a share of the tokens, neighbouring layers do not share a
/// selection, and nothing is encrypted.
struct mpcache : named_policies<unit<16>, min_max, max_score, always> {
  static constexpr std::string_view name = "mpcache";
  static constexpr std::string_view about =
      "three tenths of the prompt, which its last rows attend to most, and of these boxes of 16 keys";
  static constexpr std::string_view published = "arXiv 2501.06807";
  static constexpr float prompt_share = 0.3f;
};
/// ShadowKV (arXiv 2410.21465, section 4): chunks of 8 tokens by their mean keys, the most of the group's
/// softmaxes counting, 48 outlier chunks always selected beside 256 others; values are recalled, and keys
/// rebuilt from 160 coefficients of what all heads' were before rotation (of 1024 numbers in the paper; take
/// as large a share of fewer), in a basis and with the model's rotation given in `codec`; selected anew
/// before every attention. Unlike the paper's, whatever the sequence's prompt or another text: the basis is
/// given, tokens decoded later have coefficients too, keys of sink, window and outliers are rebuilt like
/// others once their page is complete, and outliers are among the prompt's chunks beyond sink and window.
struct shadowkv : named_policies<unit<8>, mean, max_softmax, pin_outliers<48>, always, low_rank_keys<160>> {
  static constexpr std::string_view name = "shadowkv";
  static constexpr std::string_view about =
      "chunks of 8 by their mean keys, outliers pinned; keys rebuilt from coefficients";
  static constexpr std::string_view published = "arXiv 2410.21465";
};
/// ThinK (arXiv 2407.21018): freekv over keys of which 0.4 of the channels are not kept, those that tell
/// least for the prompt's last rows; which are is given in `codec`, as `choose_key_channels` finds them.
/// Unlike in the paper, where thinner keys are all that attention has of a full cache or of what an eviction
/// keeps, pages are summarised by their whole keys and selected as freekv does; beside freekv it shows what
/// the pruning does. A group of query heads has one list, and keys of sink, window and decoded tokens are
/// thinned too, once their page is complete.
struct think : named_policies<min_max, cosine_drift, key_channels> {
  static constexpr std::string_view name = "think";
  static constexpr std::string_view about =
      "freekv over keys without the channels that tell least for queries";
  static constexpr std::string_view published = "arXiv 2407.21018";
};
/// RazorAttention (arXiv 2407.15891): some heads keep everything, the others sink and window; without its
/// compensation token, which razor_attention_compensated has. Which heads is the plan's `kinds`.
struct razor_attention : named_policies<by_head> {
  static constexpr std::string_view name = "razor_attention";
  static constexpr std::string_view about = "some heads keep everything, the others sink and window";
  static constexpr std::string_view published = "arXiv 2407.15891";
};
/// DuoAttention (arXiv 2410.10819): as razor_attention, with the heads that its training finds.
struct duo_attention : named_policies<by_head> {
  static constexpr std::string_view name = "duo_attention";
  static constexpr std::string_view about = "as razor_attention, with heads that a training finds";
  static constexpr std::string_view published = "arXiv 2410.10819";
};
/// FreeKV as published: min-max summaries, speculative retrieval, correction by query drift. (Not called
/// `freekv`, as the namespace is.)
struct freekv_paper : named_policies<min_max, cosine_drift> {
  static constexpr std::string_view name = "freekv";
  static constexpr std::string_view about =
      "min-max summaries, speculative retrieval, correction by query drift";
  static constexpr std::string_view published = "arXiv 2505.13109";
};
/// FreeKV as published for long inputs, with its `correction`; with 0.9 it is published for long outputs
/// (section 5.1).
struct freekv_long_inputs : named_policies<min_max, cosine_drift> {
  static constexpr std::string_view name = "freekv_long_inputs";
  static constexpr std::string_view about = "freekv with tau 0.8, as published for long inputs";
  static constexpr std::string_view published = "arXiv 2505.13109";
  static inline const cosine_drift correction{.tau = 0.8f};
};
/// FreeKV without correction: the selection of the step before, whatever the query.
struct freekv_never : named_policies<min_max, never> {
  static constexpr std::string_view name = "freekv_never";
  static constexpr std::string_view about = "freekv without correction";
  static constexpr std::string_view published = "";
};
/// FreeKV that selects the fewest of the k best pages that have 0.95 of the mass, with its `selection`.
struct freekv_top_p : named_policies<min_max, top_p, cosine_drift> {
  static constexpr std::string_view name = "freekv_top_p";
  static constexpr std::string_view about = "the fewest of the k best pages that have 0.95 of the mass";
  static constexpr std::string_view published = "";
  static constexpr top_p selection{.p = 0.95f};
};
/// FreeKV that selects as many of the k best pages as have 0.9 of the attention, by temperatures that
/// `calibrate_top_p` finds from a prompt: the caller puts them into `selection`. (HARD-KV, section 3)
struct freekv_calibrated_top_p : named_policies<min_max, top_p, cosine_drift> {
  static constexpr std::string_view name = "freekv_calibrated_top_p";
  static constexpr std::string_view about =
      "as many of the k best pages as have 0.9 of the attention, by calibrated temperatures";
  static constexpr std::string_view published = "arXiv 2606.28831";
  static constexpr top_p selection{.p = 0.9f};
  static constexpr bool calibrated = true;
};
/// FreeKV with one selection for all heads of a layer.
struct freekv_per_layer : named_policies<min_max, per_layer, cosine_drift> {
  static constexpr std::string_view name = "freekv_per_layer";
  static constexpr std::string_view about = "one selection for all heads of a layer";
  static constexpr std::string_view published = "";
};
/// FreeKV with the mean keys of chunks of 8 tokens.
struct freekv_chunk_means : named_policies<chunk_means<8>, cosine_drift> {
  static constexpr std::string_view name = "freekv_chunk_means";
  static constexpr std::string_view about = "mean keys of chunks of 8 tokens";
  static constexpr std::string_view published = "";
};
/// freekv_chunk_means without correction.
struct freekv_chunk_means_never : named_policies<chunk_means<8>, never> {
  static constexpr std::string_view name = "freekv_chunk_means_never";
  static constexpr std::string_view about = "freekv_chunk_means without correction";
  static constexpr std::string_view published = "";
};
/// FreeKV with token estimates in a 24-dimensional subspace at 3 bits.
struct freekv_key_subspace : named_policies<key_subspace<24, 3>, cosine_drift> {
  static constexpr std::string_view name = "freekv_key_subspace";
  static constexpr std::string_view about = "token estimates in a 24-dimensional subspace at 3 bits";
  static constexpr std::string_view published = "";
};
/// freekv_key_subspace without correction.
struct freekv_key_subspace_never : named_policies<key_subspace<24, 3>, never> {
  static constexpr std::string_view name = "freekv_key_subspace_never";
  static constexpr std::string_view about = "freekv_key_subspace without correction";
  static constexpr std::string_view published = "";
};
/// freekv_key_subspace, corrected where the selected pages miss a fifth of the mass that the best would have;
/// with its `correction` page by page, at about a fifth of the recalls before attention that cosine_drift
/// with tau 0.9 has (docs/frontiers.md; of key_codes a seventh, docs/results.md).
struct freekv_key_subspace_deficit : named_policies<key_subspace<24, 3>, mass_deficit> {
  static constexpr std::string_view name = "freekv_key_subspace_deficit";
  static constexpr std::string_view about =
      "freekv_key_subspace corrected page by page where selected pages miss a fifth of the best mass";
  static constexpr std::string_view published = "";
  static constexpr mass_deficit correction{.delta = 0.2f, .partial = true};
};
/// FreeKV with tokens by product quantisation, 6 bytes each.
struct freekv_key_codes : named_policies<key_codes<6>, cosine_drift> {
  static constexpr std::string_view name = "freekv_key_codes";
  static constexpr std::string_view about = "tokens by product quantisation, 6 bytes each";
  static constexpr std::string_view published = "";
};
/// freekv_key_codes without correction.
struct freekv_key_codes_never : named_policies<key_codes<6>, never> {
  static constexpr std::string_view name = "freekv_key_codes_never";
  static constexpr std::string_view about = "freekv_key_codes without correction";
  static constexpr std::string_view published = "";
};
/// freekv_key_codes, corrected as freekv_key_subspace_deficit is, with its `correction`.
struct freekv_key_codes_deficit : named_policies<key_codes<6>, mass_deficit> {
  static constexpr std::string_view name = "freekv_key_codes_deficit";
  static constexpr std::string_view about = "freekv_key_codes corrected as freekv_key_subspace_deficit";
  static constexpr std::string_view published = "";
  static constexpr mass_deficit correction{.delta = 0.2f, .partial = true};
};
/// freekv_key_codes_deficit, and a page that is held stays until another has twice its mass, with its
/// `selection`: half the recalls (docs/frontiers.md).
struct freekv_key_codes_sticky : named_policies<key_codes<6>, sticky_top_k, mass_deficit> {
  static constexpr std::string_view name = "freekv_key_codes_sticky";
  static constexpr std::string_view about =
      "freekv_key_codes_deficit, and held pages stay until another has twice their mass";
  static constexpr std::string_view published = "";
  static constexpr sticky_top_k selection{};
  static constexpr mass_deficit correction{.delta = 0.2f, .partial = true};
};
/// freekv_key_codes_sticky, corrected by what the held pages lack of all attention, window included, with its
/// `correction`: half the recalls before attention (docs/frontiers.md).
struct freekv_key_codes_missing : named_policies<key_codes<6>, sticky_top_k, missing_share> {
  static constexpr std::string_view name = "freekv_key_codes_missing";
  static constexpr std::string_view about =
      "freekv_key_codes_sticky corrected where held pages lack a twentieth of all attention";
  static constexpr std::string_view published = "";
  static constexpr sticky_top_k selection = freekv_key_codes_sticky::selection;
  static constexpr missing_share correction{.delta = 0.05f, .partial = true};
};
/// freekv_key_codes_sticky that selects and recalls units of 4 tokens instead of pages, eight times as many:
/// 8 bytes a token where pages take 6.25. (KL from full attention: docs/results.md)
struct freekv_key_codes_units : named_policies<unit<4>, key_codes<6>, sticky_top_k, mass_deficit> {
  static constexpr std::string_view name = "freekv_key_codes_units";
  static constexpr std::string_view about = "freekv_key_codes_sticky in units of 4 tokens instead of pages";
  static constexpr std::string_view published = "";
  static constexpr sticky_top_k selection = freekv_key_codes_sticky::selection;
  static constexpr mass_deficit correction = freekv_key_codes_sticky::correction;
};
/// freekv_key_codes_sticky, and what is not selected is attended to by estimated masses and pages' values.
struct freekv_key_codes_completed : named_policies<key_codes<6>, sticky_top_k, mass_deficit, page_values> {
  static constexpr std::string_view name = "freekv_key_codes_completed";
  static constexpr std::string_view about =
      "freekv_key_codes_sticky, and an entry for each page that is not selected";
  static constexpr std::string_view published = "";
  static constexpr sticky_top_k selection = freekv_key_codes_sticky::selection;
  static constexpr mass_deficit correction = freekv_key_codes_sticky::correction;
};
/// freekv_key_codes_units, completed as freekv_key_codes_completed is.
struct freekv_key_codes_units_completed
    : named_policies<unit<4>, key_codes<6>, sticky_top_k, mass_deficit, page_values> {
  static constexpr std::string_view name = "freekv_key_codes_units_completed";
  static constexpr std::string_view about =
      "freekv_key_codes_units, and an entry for each unit that is not selected";
  static constexpr std::string_view published = "";
  static constexpr sticky_top_k selection = freekv_key_codes_sticky::selection;
  static constexpr mass_deficit correction = freekv_key_codes_sticky::correction;
};

/// H2O: `freekv::h2o`.
struct h2o : named_eviction<freekv::h2o> {
  static constexpr std::string_view name = "h2o";
  static constexpr std::string_view about = "the tokens that have had most attention, and the latest";
  static constexpr std::string_view published = "arXiv 2306.14048";
};
/// MiKV: `freekv::mikv`.
struct mikv : named_eviction<freekv::mikv> {
  static constexpr std::string_view name = "mikv";
  static constexpr std::string_view about = "no token leaves; what h2o would have leave is kept in 4 bits";
  static constexpr std::string_view published = "arXiv 2402.18096";
};
/// Q-Hitter: `freekv::q_hitter`.
struct q_hitter : named_eviction<freekv::q_hitter> {
  static constexpr std::string_view name = "q_hitter";
  static constexpr std::string_view about =
      "the tokens of most attention so far, those that also suit 4 bits, and the latest, all in 4 bits";
  static constexpr std::string_view published = "MLSys 2024";
};

/// TOVA: `freekv::tova`.
struct tova : named_eviction<freekv::tova> {
  static constexpr std::string_view name = "tova";
  static constexpr std::string_view about = "the token that the current row attends to least leaves";
  static constexpr std::string_view published = "arXiv 2401.06104";
};
/// SnapKV: `freekv::snapkv`.
struct snapkv : named_eviction<freekv::snapkv> {
  static constexpr std::string_view name = "snapkv";
  static constexpr std::string_view about = "a prompt's last rows vote for what stays of it";
  static constexpr std::string_view published = "arXiv 2404.14469";
};
/// DapQ: `freekv::dapq`, to which an engine gives the queries of pseudo tokens.
struct dapq : named_eviction<freekv::dapq> {
  static constexpr std::string_view name = "dapq";
  static constexpr std::string_view about = "snapkv whose votes are those of pseudo tokens behind the prompt";
  static constexpr std::string_view published = "arXiv 2603.11564";
};
/// EpiCache's cuts of prompts: `freekv::epi_cache`, to which an engine gives the queries of a patched prompt.
struct epi_cache : named_eviction<freekv::epi_cache> {
  static constexpr std::string_view name = "epi_cache";
  static constexpr std::string_view about =
      "a prompt is cut behind each block by rows behind it, and never has more than budget and block";
  static constexpr std::string_view published = "arXiv 2509.17396";
};
/// PyramidKV: `freekv::pyramid_kv`.
struct pyramid_kv : named_eviction<freekv::pyramid_kv> {
  static constexpr std::string_view name = "pyramid_kv";
  static constexpr std::string_view about = "snapkv with a budget that falls from layer to layer";
  static constexpr std::string_view published = "arXiv 2406.02069";
};
/// RaaS: `freekv::raas`.
struct raas : named_eviction<freekv::raas> {
  static constexpr std::string_view name = "raas";
  static constexpr std::string_view about = "the page that no row has attended to for longest leaves";
  static constexpr std::string_view published = "arXiv 2502.11147";
};

/// LazyEviction: `freekv::lazy_eviction`.
struct lazy_eviction : named_eviction<freekv::lazy_eviction> {
  static constexpr std::string_view name = "lazy_eviction";
  static constexpr std::string_view about =
      "at times those leave that have been unattended for longest in their own intervals";
  static constexpr std::string_view published = "arXiv 2506.15969";
};

/// HARD-KV: `freekv::hard_kv`.
struct hard_kv : named_eviction<freekv::hard_kv> {
  static constexpr std::string_view name = "hard_kv";
  static constexpr std::string_view about =
      "of each head the fewest tokens that have 0.9 of a row's mass, by calibrated temperatures";
  static constexpr std::string_view published = "arXiv 2606.28831";
};

/// DefensiveKV: `freekv::defensive_kv`.
struct defensive_kv : named_eviction<freekv::defensive_kv> {
  static constexpr std::string_view name = "defensive_kv";
  static constexpr std::string_view about =
      "snapkv by the most that any row gives a token, and at least the mean";
  static constexpr std::string_view published = "arXiv 2510.13334";
};
/// Layer-DefensiveKV: `freekv::layer_defensive_kv`.
struct layer_defensive_kv : named_eviction<freekv::layer_defensive_kv> {
  static constexpr std::string_view name = "layer_defensive_kv";
  static constexpr std::string_view about =
      "defensive_kv whose heads' budgets are by the best tokens of all heads of all layers";
  static constexpr std::string_view published = "arXiv 2510.13334";
};
/// CompressKV: `freekv::compress_kv`, with a list of a model's query heads, or all of them.
struct compress_kv : named_eviction<freekv::compress_kv> {
  static constexpr std::string_view name = "compress_kv";
  static constexpr std::string_view about =
      "a few query heads of a layer, listed for a model, choose for all its KV heads";
  static constexpr std::string_view published = "arXiv 2508.02401";
};
/// CAKE: `freekv::cake`.
struct cake : named_eviction<freekv::cake> {
  static constexpr std::string_view name = "cake";
  static constexpr std::string_view about =
      "layers' budgets by the spread and shift of their attention, tokens by mean and variance";
  static constexpr std::string_view published = "arXiv 2503.12491";
};

/// R-KV: `freekv::r_kv`.
struct r_kv : named_eviction<freekv::r_kv> {
  static constexpr std::string_view name = "r_kv";
  static constexpr std::string_view about =
      "tokens that are attended to and whose keys are unlike the others'";
  static constexpr std::string_view published = "arXiv 2505.24133";
};

/// ARKV without its tier in fp8: `freekv::arkv_origin`.
struct arkv_origin : named_eviction<freekv::arkv_origin> {
  static constexpr std::string_view name = "arkv_origin";
  static constexpr std::string_view about =
      "a quarter leaves at a time, by mean and variance of shares; ARKV's baseline without fp8";
  static constexpr std::string_view published = "2026";
};

/// ARKV: `freekv::arkv`.
struct arkv : named_eviction<freekv::arkv> {
  static constexpr std::string_view name = "arkv";
  static constexpr std::string_view about =
      "arkv_origin that keeps in fp8 what a layer's ratio leaves of it, which is little, as published";
  static constexpr std::string_view published = "2026";
};
/// ARKV whose ratio is of what stays: `freekv::arkv_split`.
struct arkv_split : named_eviction<freekv::arkv_split> {
  static constexpr std::string_view name = "arkv_split";
  static constexpr std::string_view about =
      "arkv_origin that keeps the better part of what stays as it is, by a layer's ratio, the rest in fp8";
  static constexpr std::string_view published = "";
};

/// D2O without its budgets of layers: `freekv::d2o`.
struct d2o : named_eviction<freekv::d2o> {
  static constexpr std::string_view name = "d2o";
  static constexpr std::string_view about =
      "h2o whose evicted tokens merge into the most similar, where they are similar enough";
  static constexpr std::string_view published = "arXiv 2406.13035";
};
/// Merging that is exact in the row that decides: `freekv::exact_merge`.
struct exact_merge : named_eviction<freekv::exact_merge> {
  static constexpr std::string_view name = "exact_merge";
  static constexpr std::string_view about =
      "tova whose evicted tokens merge into the most similar, so that the row's attention stays";
  static constexpr std::string_view published = "";
};

/// HARD-KV with merging: `freekv::hard_kv_merge`.
struct hard_kv_merge : named_eviction<freekv::hard_kv_merge> {
  static constexpr std::string_view name = "hard_kv_merge";
  static constexpr std::string_view about =
      "hard_kv whose evicted tokens merge into the most similar, so that the last row's attention stays";
  static constexpr std::string_view published = "arXiv 2606.28831";
};

/// HARD-KV with its own merging: `freekv::hard_kv_pairs`.
struct hard_kv_pairs : named_eviction<freekv::hard_kv_pairs> {
  static constexpr std::string_view name = "hard_kv_pairs";
  static constexpr std::string_view about =
      "hard_kv whose worst evicted tokens merge into the best that stay, as its appendix has it";
  static constexpr std::string_view published = "arXiv 2606.28831";
};

/// KVMerger: `freekv::kv_merger`.
struct kv_merger : named_eviction<freekv::kv_merger> {
  static constexpr std::string_view name = "kv_merger";
  static constexpr std::string_view about =
      "a prompt's runs of neighbours with similar keys become a token each, as many as the budget has";
  static constexpr std::string_view published = "arXiv 2407.08454";
};

/// RazorAttention with its compensation token: `freekv::razor_attention_compensated`.
struct razor_attention_compensated : named_eviction<freekv::razor_attention_compensated> {
  static constexpr std::string_view name = "razor_attention_compensated";
  static constexpr std::string_view about =
      "razor_attention, and one token for all that the others' windows have left behind";
  static constexpr std::string_view published = "arXiv 2407.15891";
};

/// TRIM-KV: `freekv::trim_kv`, whose betas an engine gives.
struct trim_kv : named_eviction<freekv::trim_kv> {
  static constexpr std::string_view name = "trim_kv";
  static constexpr std::string_view about =
      "the token of which least is retained leaves, by betas of trained gates that an engine gives";
  static constexpr std::string_view published = "arXiv 2512.03324";
};
/// Locret: `freekv::given_worths`, whose scores an engine gives.
struct given_worths : named_eviction<freekv::given_worths> {
  static constexpr std::string_view name = "given_worths";
  static constexpr std::string_view about =
      "the token of the least score leaves, by trained heads' scores that an engine gives";
  static constexpr std::string_view published = "arXiv 2410.01805";
};

/// A list of methods.
template <class... Methods>
struct method_list {};
/// All of the above.
using all =
    method_list<full, streaming_llm, quest, quest_mean_softmax, quest_per_query_head, arkvale, twilight,
                infinigen, fasa, clusterkv, magicpig, mpcache, shadowkv, think, razor_attention,
                duo_attention, freekv_paper, freekv_long_inputs, freekv_never, freekv_top_p,
                freekv_calibrated_top_p, freekv_per_layer, freekv_chunk_means, freekv_chunk_means_never,
                freekv_key_subspace, freekv_key_subspace_never, freekv_key_subspace_deficit, freekv_key_codes,
                freekv_key_codes_never, freekv_key_codes_deficit, freekv_key_codes_sticky,
                freekv_key_codes_missing, freekv_key_codes_units, freekv_key_codes_completed,
                freekv_key_codes_units_completed, h2o, mikv, q_hitter, tova, snapkv, dapq, epi_cache,
                pyramid_kv, raas, lazy_eviction, hard_kv, defensive_kv, layer_defensive_kv, compress_kv, cake,
                r_kv, arkv_origin, arkv, arkv_split, d2o, exact_merge, hard_kv_merge, hard_kv_pairs,
                kv_merger, razor_attention_compensated, trim_kv, given_worths>;

}  // namespace methods
}  // namespace freekv

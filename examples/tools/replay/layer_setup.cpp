#include "layer_setup.hpp"

#include <algorithm>
#include <filesystem>
#include <freekv/core/size.hpp>
#include <new>
#include <span>
#include <stdexcept>
#include <string>

#include "cited.hpp"
#include "device_pipeline.hpp"
#include "head_list.hpp"
#include "layer_list.hpp"
#include "selected_rows.hpp"

namespace freekv::examples {
namespace {

constexpr int most_clusters = 1 << 16, most_bits = 11, most_tables = 4096;

[[noreturn]] void refuse(const std::string& sentence) { throw choice_error(sentence); }

constexpr int most_layers = 1024;  // a list has all of a model's, and a trace does not say how many

/// The trace's layer, of which `list` says something.
int layer_in_list(const trace_form& t, const std::string& list) {
  if (!t.layer || *t.layer >= most_layers)
    refuse("the trace names " + (t.layer ? "layer " + std::to_string(*t.layer) : "no layer") + ", so " +
           list + "; write its number, below " + std::to_string(most_layers) +
           ", as layer into its metadata");
  return *t.layer;
}

/// What `read` reads for the heads of the trace's layer from the list that --heads names.
template <class Read>
auto of_layer(const replay_options& o, const trace_form& t, int heads, const Read& read) {
  const int layer = layer_in_list(t, "--heads cannot say what its heads keep");
  auto all = read(std::filesystem::path(*o.heads), most_layers, heads);
  const auto first = all.begin() + std::ptrdiff_t{layer} * heads;
  return decltype(all)(first, first + heads);
}
/// What each KV head of the trace's layer keeps, where --heads says it.
std::vector<layer_kind> head_kinds_of(const replay_options& o, const trace_form& t) {
  if (!o.heads || o.method.takes_voters()) return {};
  return of_layer(o, t, t.kv_heads, [](const auto& path, int layers, int heads) {
    return read_head_list(path, layers, heads);
  });
}
/// Which of its query heads choose, where --heads says that.
std::vector<std::uint8_t> voters_of(const replay_options& o, const trace_form& t) {
  if (!o.heads || !o.method.takes_voters()) return {};
  return of_layer(o, t, t.query_heads, read_voters);
}

void in_head_dim(const std::string& flag, int value, const trace_form& t) {
  if (value < 1 || value > t.head_dim)
    refuse(flag + " " + std::to_string(value) + " is not between 1 and head_dim " +
           std::to_string(t.head_dim));
}

int layer_of(const replay_options& o, const trace_form& t, int layers) {
  if (!o.basis_layer && !t.layer && layers != 1)
    refuse(cited_path(o.basis) + " has " + std::to_string(layers) +
           " layers and the trace names none; give --basis-layer");
  const int layer = o.basis_layer.value_or(layers == 1 ? 0 : t.layer.value_or(0));
  if (layer < 0 || layer >= layers)
    refuse(cited_path(o.basis) + " has " + std::to_string(layers) + " layers, so none numbered " +
           std::to_string(layer) + "; give --basis-layer from 0 to " + std::to_string(layers - 1));
  return layer;
}

}  // namespace

basis_file basis_file_of(const replay_options& o) {
  basis_file file;
  if (o.basis == "prompt") return file;
  if (o.method.needs_basis()) file.basis = key_basis::load(o.basis);
  if (o.method.needs_codebooks()) file.codebooks = codebook_set::load(o.basis);
  return file;
}

std::unique_ptr<pipeline> replayed_pipeline(const replay_options& o, const pipeline_options& of_layer,
                                            host_backend& backend) {
  const auto refuse_for_memory = [&] {
    const method_spec& m = o.method;
    std::string flags = "--k " + std::to_string(o.k);
    if (columns_of(m, o.k) != o.k) flags += ", --pinned " + std::to_string(m.pinned);
    if (m.spare != 0) flags += ", --spare " + std::to_string(m.spare);
    refuse("not enough memory for " + std::to_string(of_layer.max_tokens) + " tokens with --sink " +
           std::to_string(o.sink) + ", --window " + std::to_string(o.window) + ", " + flags +
           "; lower the largest of these, or name a --store-file");
  };
  try {
    return o.backend == "cuda" ? make_device_pipeline(of_layer) : make_pipeline(of_layer, backend);
  } catch (const std::bad_alloc&) {
    refuse_for_memory();
  } catch (const std::length_error&) {
    refuse_for_memory();
  }
  return nullptr;
}

replay_options options_of_layer(const replay_options& o, const trace_form& t) {
  replay_options own = o;
  if (!o.by_layer) return own;
  const int layer = layer_in_list(t, "--by-layer cannot say what it selects");
  const layer_values values =
      read_layer_list(std::filesystem::path(*o.by_layer), most_layers)[to_size(layer)];
  if (values.selected_tokens) {
    const int unit = std::max(o.method.unit_tokens(o.page), 1);  // a page of 0 is refused later
    if (*values.selected_tokens % unit != 0)
      refuse("--by-layer " + cited_path(*o.by_layer) + " has " + std::to_string(*values.selected_tokens) +
             " tokens for layer " + std::to_string(layer) + ", and units have " + std::to_string(unit) +
             "; give multiples");
    own.k = *values.selected_tokens / unit;
  }
  if (values.tau) own.tau = own.method.tau = *values.tau;
  if (values.delta) own.delta = own.method.delta = *values.delta;
  return own;
}

layer_setup::layer_setup(const replay_options& o, const trace_form& t, const basis_file& file)
    : options_{.element = t.element,
               .head_dim = t.head_dim,
               .query_heads = t.query_heads,
               .kv_heads = t.kv_heads,
               .page = o.page,
               .budget = {o.sink, o.window, o.k},
               .scale = static_cast<float>(o.scale != 0 ? o.scale : t.scale),
               .sliding_window = o.sliding_window.value_or(0),
               .soft_cap = static_cast<float>(o.soft_cap),
               .sink_logits = t.sink_logits,
               .in_place = o.route == "in_place",
               .store_file = o.store_file.value_or(""),
               .layout = o.layout,
               .method = o.method,
               .head_kinds = head_kinds_of(o, t),
               .voters = voters_of(o, t)} {
  if (o.method.evicts() && (o.soft_cap != 0 || !t.sink_logits.empty()))
    refuse("--variant " + o.variant + " forgets by attention without " +
           (o.soft_cap != 0 ? "--soft-cap" : "the trace's sink_logits") +
           "; choose a variant that retrieves");
  if (o.method.takes_worths() && !t.has_worths)
    refuse("--variant " + o.variant +
           " goes by what a model's gates say of each token, and the trace has no tensor worths (tokens, "
           "n_kv); record it too, or choose another variant");
  if (o.method.takes_probes() && t.probe_rows == 0)
    refuse(
        "--variant " + o.variant +
        " goes by the queries of pseudo tokens behind the prompt, and the trace has no tensor q_probe (rows, "
        "n_qo, d); record it too, or choose another variant");
  if (o.method.needs_basis()) take_basis(o, t, file);
  if (o.method.needs_codebooks()) take_codebooks(o, t, file);
  if (o.method.needs_factors()) take_factors(o, t);
  if (o.method.needs_channels()) take_channels(o, t);
  if (o.method.needs_temperatures()) {
    temperatures_.assign(to_size(t.kv_heads), 1.0f);
    options_.temperatures = {temperatures_.data(), 1, t.kv_heads};
  }
}

void layer_setup::learn(const trace& t) {
  if (basis_ && options_.method.rows_of_basis() == basis_rows::centroids) {
    basis_->cluster(0, t.prompt_keys());
  } else if (basis_ && options_.method.rows_of_basis() == basis_rows::hyperplanes) {
    basis_->draw(0, t.prompt_keys());
  } else if (basis_ && options_.method.basis_of_pairs) {
    const int rows = std::min(t.prompt_len, rows_that_choose);
    basis_->choose_pairs(0, t.prompt_keys(), t.queries_of(t.prompt_len - rows, rows), rows, pairs_);
  } else if (basis_) {
    basis_->learn(0, t.prompt_keys());
  }
  if (codebooks_) codebooks_->learn(0, t.prompt_keys());
  if (!temperatures_.empty()) {
    const int rows = std::min(t.prompt_len, rows_that_calibrate);
    pipeline_options settled = options_;
    settled.max_tokens = std::max(1, t.tokens);
    calibrate(settled, 0, t.prompt_keys(), t.queries_of(t.prompt_len - rows, rows), temperatures_);
  }
  if (!channels_.empty()) {
    const int rows = std::min(t.prompt_len, rows_that_choose_channels);
    choose_key_channels({t.query_heads, t.kv_heads}, t.head_dim,
                        key_channels{options_.method.pruned}.kept(t.head_dim), t.prompt_keys(),
                        t.queries_of(t.prompt_len - rows, rows), channels_);
  }
  if (!factors_) return;
  const auto row = to_size(t.kv_heads * t.head_dim);
  factors_->factorise(
      0, t.has_keys_before_rotation
             ? std::span(t.keys_before_rotation).first(to_size(t.prompt_len) * row)
             : std::span<const float>(rotated(t.prompt_keys(), t.kv_heads, t.head_dim, rotation_, -1.0f)));
}

void layer_setup::take_rotation(const trace& t) {
  if (!factors_ || !t.has_keys_before_rotation) return;
  const std::vector<float> keys = t.float_keys();
  if (!rotation_.frequencies.empty()) {
    if (!turns_into(t.keys_before_rotation, keys, t.kv_heads, t.head_dim, rotation_))
      refuse(
          "the trace's k_pre, rotated as --rope-base and --rope-pairs or its metadata say, is not its k; "
          "leave them "
          "out, and the rotation is found");
    return;
  }
  const auto found = rotation_between(t.keys_before_rotation, keys, t.kv_heads, t.head_dim);
  if (!found)
    refuse(
        "no rotation of whole keys from position 0 on turns the trace's k_pre into its k; low_rank_keys "
        "takes keys "
        "after QK-norm and before rotation, and here no other rotation");
  rotation_ = *found;
  options_.rotary = rotation_.view();
}

void layer_setup::take_factors(const replay_options& o, const trace_form& t) {
  const std::optional<double> base = o.rope_base ? o.rope_base : t.rope_base;
  if (!base && !t.has_keys_before_rotation)
    refuse(
        "low_rank_keys rebuilds keys from what they were before rotation, and the trace has neither k_pre "
        "nor "
        "rope_base; give --rope-base, and --rope-pairs neighbours if the model was a GGUF file");
  const auto of = find_by_name("--rope-pairs", rope_pairs, o.rope_pairs.value_or(t.rope_pairs)).value;
  if (base) rotation_ = rotation_of_base(*base, t.head_dim / 2, of);
  if (o.method.key_rank < 0)
    refuse("--key-rank " + std::to_string(o.method.key_rank) +
           " is below 0; give 0 for a share of the numbers");
  factors_.emplace(1, t.kv_heads, o.method.key_rank_of(t.kv_heads * t.head_dim), t.head_dim);
  options_.factors = factors_->layer(0);
  options_.rotary = rotation_.view();
}

void layer_setup::take_channels(const replay_options& o, const trace_form& t) {
  if (!(o.method.pruned >= 0.0f && o.method.pruned < 1.0f))
    refuse("--pruned " + key_channels{o.method.pruned}.values() +
           " is not a share from 0 to below 1; give one such as 0.4");
  channels_.resize(to_size(t.kv_heads * t.head_dim / 8));
  options_.channels = {channels_.data(), 1, t.kv_heads, t.head_dim};
}

void layer_setup::take_basis(const replay_options& o, const trace_form& t, const basis_file& file) {
  if (file.basis) {
    options_.basis = file.basis->layer(layer_of(o, t, file.basis->view().layers));
    return;
  }
  const basis_rows rows = o.method.rows_of_basis();
  if (rows == basis_rows::hyperplanes) {
    if (o.method.bits < 1 || o.method.bits > most_bits)
      refuse("--bits " + std::to_string(o.method.bits) + " of key_signatures is not between 1 and " +
             std::to_string(most_bits));
    if (o.method.tables < 2 || o.method.tables > most_tables)
      refuse("--tables " + std::to_string(o.method.tables) + " is not between 2 and " +
             std::to_string(most_tables));
  } else if (rows != basis_rows::centroids)
    in_head_dim("--rank", o.method.rank, t);
  else if (o.method.clusters < 0 || o.method.clusters > most_clusters)
    refuse("--clusters " + std::to_string(o.method.clusters) + " is not between 0 and " +
           std::to_string(most_clusters) + "; 0 is one for 80 tokens of the prompt");
  pairs_ = find_by_name("--rope-pairs", rope_pairs, o.rope_pairs.value_or(t.rope_pairs)).value;
  basis_.emplace(1, t.kv_heads, o.method.basis_rank(t.prompt_len), t.head_dim);
  options_.basis = basis_->layer(0);
}

void layer_setup::take_codebooks(const replay_options& o, const trace_form& t, const basis_file& file) {
  if (file.codebooks) {
    options_.codebooks = file.codebooks->layer(layer_of(o, t, file.codebooks->view().layers));
    return;
  }
  in_head_dim("--codes", o.method.codes, t);
  codebooks_.emplace(1, t.kv_heads, t.head_dim,
                     codebook_sizes::of_codes(o.method.codes, t.head_dim, o.method.unit_tokens(o.page)));
  options_.codebooks = codebooks_->layer(0);
}
}  // namespace freekv::examples

#include "options.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <iostream>
#include <limits>
#include <map>
#include <sstream>
#include <string_view>
#include <utility>

#include "cited.hpp"
#include "command_line.hpp"
#include "pipeline.hpp"

namespace freekv::examples {
namespace {

constexpr double largest_float = std::numeric_limits<float>::max();

[[noreturn]] void refuse(const std::string& sentence) { throw choice_error(sentence); }

/// All of `text` as a number. CLI11's own conversions take an empty argument for 0 and 010 for 8.
template <class Number>
std::optional<Number> number_in(const std::string& text) {
  Number value{};
  const char* end = text.data() + text.size();
  const auto [reached, fault] = std::from_chars(text.data(), end, value);
  if (fault != std::errc{} || reached != end) return std::nullopt;
  return value;
}

int whole(const std::string& option, const std::string& text) {
  const auto value = number_in<int>(text);
  if (!value)
    refuse(option + " " + cited(text) + " is not a whole number from " +
           std::to_string(std::numeric_limits<int>::min()) + " to " +
           std::to_string(std::numeric_limits<int>::max()));
  return *value;
}

double finite(const std::string& option, const std::string& text) {
  const auto value = number_in<double>(text);
  if (!value || !std::isfinite(*value))
    refuse(option + " " + cited(text) + " is not a finite number; give one such as 0.9");
  return *value;
}

double positive_float_or_zero(const std::string& option, const std::string& text) {
  const double value = finite(option, text);
  if (value < 0)
    refuse(option + " " + shortened(text) +
           " is negative; scores grow with the product of query and key, so give 0 or more");
  if (value > largest_float || (value > 0 && static_cast<float>(value) == 0.0f))
    refuse(option + " " + shortened(text) + " is outside float32's range; give one from 1e-38 to 3e38, or 0");
  return value;
}

/// The decimal number of six digits that a float stands for: 0.85 of 0.85f.
double decimal(float value) { return *number_in<double>(top_p{value}.values()); }

/// A list of names alone.
template <std::size_t N>
std::array<choice<std::string_view>, N> named(const std::string_view (&names)[N]) {
  std::array<choice<std::string_view>, N> list{};
  for (std::size_t i = 0; i < N; ++i) list[i] = {names[i], nullptr};
  return list;
}
constexpr std::string_view backends[] = {"host", "cuda"};
constexpr std::string_view routes[] = {"resident", "in_place"};
constexpr std::string_view dtypes[] = {"stored", "f32", "f16", "bf16"};

/// The variant's `value`, or the flag's where it is given. Throws choice_error for a name that is not of
/// `list`.
template <class Choices>
void take(const char* flag, const std::optional<std::string>& given, const Choices& list,
          std::string& value) {
  if (given) value = std::string(find_by_name(flag, list, *given).name);
}

/// Adds options of one type each; help shows their defaults.
class option_list {
 public:
  explicit option_list(CLI::App& app) : app_(app) {}

  void whole_number(const std::string& name, int& value, const std::string& help) {
    parsed(
        name, [name, &value](const std::string& text) { value = whole(name, text); }, help)
        ->type_name("INT")
        ->default_str(std::to_string(value));
  }
  void real_number(const std::string& name, double& value, const std::string& help) {
    std::ostringstream printed;
    printed << value;
    parsed(
        name, [name, &value](const std::string& text) { value = finite(name, text); }, help)
        ->type_name("FLOAT")
        ->default_str(printed.str());
  }
  void text(const std::string& name, std::string& value, const std::string& help) {
    app_.add_option(name, value, help)->capture_default_str();
  }
  void flag(const std::string& name, bool& value, const std::string& help) {
    app_.add_flag(name, value, help);
  }
  void optional_text(const std::string& name, std::optional<std::string>& value, const std::string& otherwise,
                     const std::string& help) {
    app_.add_option(name, value, help)->default_str(otherwise);
  }
  template <class Parse>
  CLI::Option* parsed(const std::string& name, const Parse& parse, const std::string& help) {
    return app_.add_option_function<std::string>(name, parse, help);
  }

 private:
  CLI::App& app_;
};

/// A variant's policies as the flags that say the same.
std::string flags_of(const method_spec& m) {
  if (m.plan == "complete") return "attends to everything";
  if (m.plan == "window") return "attends to sink and window alone";
  const std::string heads = m.needs_head_list() ? " --heads FILE" : "";
  if (m.plan == "eviction") return "forgets all but sink + window + k * page tokens, see below" + heads;
  const method_spec published;
  std::string text = "--summary " + m.summary + " --correction " + m.correction;
  if (m.partial) text += " --partial";
  if (m.correction == cosine_drift::name && m.tau != published.tau)
    text += " --tau " + freekv::detail::decimal(m.tau);
  if (m.selection == top_p::name && m.top_p != published.top_p)
    text += " --top-p " + freekv::detail::decimal(m.top_p);
  if (m.pooling != published.pooling) text += " --pooling " + m.pooling;
  if (m.selection != published.selection) text += " --selection " + m.selection;
  if (m.rows != published.rows) text += " --rows " + m.rows;
  if (m.pinning != published.pinning) text += " --pinning " + m.pinning;
  if (m.codec != published.codec) text += " --codec " + m.codec;
  if (m.bits != published.bits && m.summary != "key_signatures") text += " --bits " + std::to_string(m.bits);
  if (m.unit != published.unit) text += " --unit " + std::to_string(m.unit);
  if (m.basis_of_pairs) text += ", its basis rotary pairs";
  if (m.calibrated) text += " --calibrated";
  if (m.thins()) text += " --thin " + freekv::detail::decimal(m.thin);
  return text + heads;
}

/// What each variant stands for and what is written: the part of the help that no single flag explains.
std::string footer() {
  std::string text = "Variants:\n";
  for (const auto& variant : replayed_variants()) {
    std::string line = "  " + std::string(variant.name);
    line.resize(std::max<std::size_t>(line.size() + 1, 32), ' ');
    text += line + flags_of(variant.method) + "\n";
  }
  return text +
         "\nOutput tensors, a step for each token from prompt_len on:\n"
         "  out (steps, n_qo, d), lse (steps, n_qo)  F32, attention and its natural log-sum-exp\n"
         "  selected (steps, n_kv, k)                I32, pages, or with --unit units, attended as "
         "selected,\n"
         "                                           ascending, then -1;\n"
         "                                           (steps, n_qo, k) where each query head selects its own\n"
         "  corrected (steps, n_kv)                  U8, 1 where a head selected anew before it attended\n"
         "  recalled (steps, n_kv)                   I32, slices copied from the store\n"
         "  recalled_before_attention (steps, n_kv)  I32, those of them that attention waited for\n"
         "  coded (steps, n_kv, k)                   I32, of a variant that keeps tokens coded which of\n"
         "                                           selected were, ascending, then -1\n"
         "  kept (n_kv, kept)                        I32, with --thin the tokens that stay of the prompt;\n"
         "                                           pages and units are then of these and what follows\n"
         "Variants that forget have no sink and window of their own; selected is then all that is\n"
         "  attended to, tokens or raas' pages. For full\n"
         "  attention the program keeps a copy beside them. They do not truncate, preempt and restore, and\n"
         "  so take no --events.\n"
         "A folder's object has settings, layers (an object each, by their metadata's layer), and over the "
         "layers\n"
         "  mean and worst, which names its layer.\n"
         "Events, a line of JSON each; S and C are whole numbers, the next rows are those of the sequence's "
         "trace:\n"
         "  {\"op\":\"open\",\"seq\":S,\"trace\":\"FILE\"}  {\"op\":\"prompt\",\"seq\":S,\"tokens\":M}\n"
         "  {\"op\":\"step\",\"rows\":[{\"seq\":S,\"tokens\":M,\"kind\":\"decode\"},...]}, kind decode or "
         "prompt\n"
         "  {\"op\":\"truncate\",\"seq\":S,\"length\":N}  {\"op\":\"fork\",\"seq\":S,\"child\":C}\n"
         "  {\"op\":\"preempt\",\"seq\":S}, and so restore and release\n"
         "  --out then has out.S, lse.S (rows of steps), selected.S, corrected.S, recalled.S (steps) of "
         "each\n"
         "  sequence. A basis is learnt from the first trace's prompt.\n"
         "A head list has lines \"layer head kind\", kind one of retrieval, complete (keeps everything) and "
         "window\n"
         "  (sink and window alone, as heads that are not listed); # begins a comment.\n"
         "Seconds are medians over the steps; a step is append, correct, attend and select for the next.\n"
         "Exit code 0, or 2 and one sentence on stderr.\n";
}

/// "window=16,kernel=5" as numbers by names.
std::map<std::string, double> numbers_by_name(const std::string& option, const std::string& text) {
  std::map<std::string, double> numbers;
  for (std::size_t first = 0; first <= text.size();) {
    const std::size_t end = std::min(text.find(',', first), text.size());
    const std::string one = text.substr(first, end - first);
    const std::size_t equals = one.find('=');
    if (equals == one.npos || equals == 0)
      refuse(option + " " + cited(text) +
             " is no list of names and numbers; give one such as window=16,kernel=5");
    const std::string name = one.substr(0, equals);
    if (!numbers.emplace(name, finite(option + " " + shortened(name), one.substr(equals + 1))).second)
      refuse(option + " " + cited(text) + " gives " + shortened(name) + " twice; give it once");
    first = end + 1;
  }
  return numbers;
}

/// Flags that override a variant's policies.
struct policy_flags {
  std::optional<std::string> summary, pooling, selection, pinning, rows, correction, codec;
  std::optional<int> bits, unit;
  std::optional<double> tau, top_p, bonus, delta, epsilon, pruned, thin;
  bool calibrated = false;
  std::vector<int method_spec::*> numbers;  ///< of `numbers_of_variants`
};
/// Numbers that a variant may have otherwise, which flags override.
constexpr int method_spec::*numbers_of_variants[] = {
    &method_spec::chunk, &method_spec::rank,  &method_spec::clusters, &method_spec::tables,
    &method_spec::codes, &method_spec::times, &method_spec::pinned,   &method_spec::samples,
    &method_spec::every, &method_spec::spare, &method_spec::key_rank};

/// The variant's method; `numbers` has what the flags say for every variant.
method_spec chosen_method(const replay_options& o, const policy_flags& flags, method_spec numbers) {
  const auto all = replayed_variants();
  const method_spec variant = find_by_name("--variant", all, o.variant).method;
  method_spec m = std::move(numbers);
  for (int method_spec::*const number : numbers_of_variants)
    if (std::count(flags.numbers.begin(), flags.numbers.end(), number) == 0) m.*number = variant.*number;
  m.summary = variant.summary;
  m.basis_of_pairs = variant.basis_of_pairs;
  m.calibrated = flags.calibrated || variant.calibrated;
  m.pooling = variant.pooling;
  m.selection = variant.selection;
  m.pinning = variant.pinning;
  m.codec = variant.codec;
  m.rows = variant.rows;
  m.unit = flags.unit.value_or(variant.unit);
  m.correction = variant.correction;
  m.plan = o.sliding_window ? "sliding" : variant.plan;
  m.eviction = variant.eviction;
  m.partial = m.partial || (variant.partial && !flags.correction);
  take("--summary", flags.summary, summaries, m.summary);
  take("--pooling", flags.pooling, poolings, m.pooling);
  take("--selection", flags.selection, selections, m.selection);
  take("--pinning", flags.pinning, pinnings, m.pinning);
  take("--codec", flags.codec, codecs, m.codec);
  take("--rows", flags.rows, selection_scopes, m.rows);
  take("--correction", flags.correction, corrections, m.correction);
  (void)find_by_name("--summary-dtype", formats, m.format);
  (void)find_by_name("--drift-pool", drift_pools, m.drift_pool);
  (void)find_by_name("--residency", residencies, m.residency);
  if (!variant.retrieves() || o.sliding_window) {  // these neither score pages nor correct
    const method_spec published;
    m.summary = published.summary;
    m.pooling = published.pooling;
    m.selection = published.selection;
    m.pinning = published.pinning;
    m.rows = published.rows;
    m.unit = published.unit;
    m.correction = published.correction;
  }
  m.bits = flags.bits.value_or(m.summary == "key_sketch"             ? 2
                               : m.summary == "key_signatures"       ? int{key_signatures<>{}.bits}
                               : variant.summary == "key_signatures" ? method_spec{}.bits
                                                                     : variant.bits);
  // Flags as its largest or lowest number does: always, or never.
  m.tau = flags.tau ? nearest_float(*flags.tau) : variant.tau;
  m.top_p = flags.top_p ? nearest_float(*flags.top_p) : variant.top_p;
  m.bonus = flags.bonus ? nearest_float(*flags.bonus) : variant.bonus;
  m.pruned = flags.pruned ? nearest_float(*flags.pruned) : variant.pruned;
  m.delta = flags.delta ? nearest_float(*flags.delta) : flags.correction ? m.usual_delta() : variant.delta;
  if (flags.epsilon) m.epsilon = nearest_float(*flags.epsilon);
  m.thin = flags.thin ? nearest_float(*flags.thin) : o.sliding_window ? 1.0f : variant.thin;
  if (m.thins() && (o.events || o.sliding_window || o.backend != "host"))
    refuse("--thin, or --variant " + o.variant +
           " that stands for it, is for a trace whose layer attends to all of it, on the host; leave out "
           "--events, --sliding-window and --backend");
  m.selection_scale = static_cast<float>(o.selection_scale);
  if ((m.plan == "complete" || m.evicts()) && (m.codec != method_spec{}.codec || o.store_file))
    refuse("--codec and --store-file are for what is recalled, and --variant " + o.variant +
           " recalls nothing; choose another variant");
  if (!m.eviction_values.empty() && !m.evicts())
    refuse("--eviction-values are of a method that forgets, and --variant " + o.variant +
           (o.sliding_window ? " with --sliding-window" : "") + " does not; choose another variant");
  if (o.heads && o.sliding_window)
    refuse(
        "--heads says which heads retrieve, and in a layer with --sliding-window none does; choose one of "
        "the two");
  if (o.heads && !m.retrieves() && !m.needs_head_list() && !m.takes_voters())
    refuse("--heads says which heads retrieve, and --variant " + o.variant +
           " does not; choose another variant");
  if (o.by_layer && (!m.retrieves() || o.events))
    refuse("--by-layer says what each recorded layer selects, and " +
           (o.events ? "--events has rows of no layer" : "--variant " + o.variant + " selects nothing") +
           "; leave one of the two out");
  if (!o.heads && m.needs_head_list())
    refuse("--variant " + o.variant + " keeps what each head needs; name a list of heads with --heads");
  if (o.heads && m.retrieves()) m.plan = "by_head";
  check_thinning(m);
  return m;
}

}  // namespace

std::vector<named_variant> replayed_variants() {
  std::vector<named_variant> methods;
  for (const auto& variant : variants())
    if (variant.page == 0 && variant.budget_share == 1 && !variant.method.completes())
      methods.push_back(variant);
  return methods;
}

std::optional<replay_options> parse_replay_options(int argc, char** argv) {
  replay_options o;
  method_spec numbers;
  policy_flags flags;
  CLI::App app("Replays recorded layers through a retrieval method. Prints one JSON object.",
               "freekv-replay");
  app.set_help_flag("-h,--help", "Show this help and exit");
  const CLI::Option* const trace = app.add_option(
      "trace", o.trace,
      "safetensors file: q (T, n_qo, d), k and v (T, n_kv, d) in F32, F16 or BF16, and where the model has "
      "them sink_logits (n_qo); for low_rank_keys k_pre, as k, the keys before rotation; for trim_kv and "
      "given_worths worths (T, n_kv), what the model's gates say; for dapq and epi_cache q_probe (rows, "
      "n_qo, d), queries of pseudo tokens behind the prompt, or behind each block of it; metadata "
      "prompt_len, the "
      "number of prompt tokens. Or a folder of such files "
      "(*.safetensors), a layer "
      "each");
  option_list add(app);
  const auto number_of_variants = [&](const char* name, int method_spec::*number, const std::string& help) {
    add.parsed(
           name,
           [&, name, number](const std::string& text) {
             numbers.*number = whole(name, text);
             flags.numbers.push_back(number);
           },
           help)
        ->type_name("INT")
        ->default_str(std::to_string(numbers.*number));
  };
  add.text("--variant", o.variant, "Method, see below: " + names_of(replayed_variants()));
  add.whole_number("--page", o.page, "Tokens in a page, a multiple of 8 from 8 to 256");
  add.whole_number("--sink", o.sink, "Sink tokens, a multiple of the page");
  add.whole_number("--window", o.window, "Window tokens, a positive multiple of the page");
  add.whole_number("--k", o.k, "Selected pages, or with --unit units, of each KV head");
  add.parsed(
         "--tau", [&](const std::string& text) { flags.tau = finite("--tau", text); },
         "cosine_drift: correct a KV head whose queries' pooled cosine is below this")
      ->type_name("FLOAT")
      ->default_str("0.9, of freekv_long_inputs 0.8");
  add.optional_text("--summary", flags.summary, "the variant's", "Page summary: " + names_of(summaries));
  add.parsed(
         "--eviction-values",
         [&](const std::string& text) {
           numbers.eviction_values = numbers_by_name("--eviction-values", text);
         },
         "Of a variant that forgets: numbers of its policy by their names, such as window=16,kernel=5; a "
         "wrong "
         "name is answered with those there are")
      ->type_name("LIST")
      ->default_str("as published, sink and window as --sink and --window where it has these");
  add.text("--summary-dtype", numbers.format,
           "Of the summary's numbers: " + names_of(formats) +
               "; standard is the key's type for min_max and float32 for others, and key_sketch and "
               "key_subspace have --bits, key_codes has --codes, coarse_to_fine has --times instead");
  number_of_variants("--chunk", &method_spec::chunk, "chunk_means: tokens in a chunk, a divisor of the page");
  number_of_variants("--rank", &method_spec::rank, "key_subspace: dimensions, at most head_dim");
  number_of_variants("--clusters", &method_spec::clusters,
                     "key_clusters: clusters of the prompt's keys; 0: one for 80 tokens");
  number_of_variants("--tables", &method_spec::tables, "key_signatures: hash tables, at least 2");
  number_of_variants("--codes", &method_spec::codes, "key_codes: bytes a token");
  number_of_variants(
      "--times", &method_spec::times,
      "coarse_to_fine: so many times --k candidates are kept by min_max and scored by key_sketch "
      "in 4 bits");
  add.parsed(
         "--bits", [&](const std::string& text) { flags.bits = whole("--bits", text); },
         "Of a coefficient of key_subspace: 2, 3, 4, 8, or 32 for unquantised; of a residual of key_sketch: "
         "1, 2 or 4; of a hash table of key_signatures: 1 to 11")
      ->type_name("INT")
      ->default_str("3, of key_sketch 2, of key_signatures 10, of infinigen 32");
  add.text("--basis", o.basis,
           "key_subspace, key_clusters, key_signatures and key_codes: prompt, to learn from the prompt's "
           "keys, or a file of "
           "freekv-basis");
  add.parsed(
         "--basis-layer", [&](const std::string& text) { o.basis_layer = whole("--basis-layer", text); },
         "Layer of that file")
      ->type_name("INT")
      ->default_str("the only one, or the trace's");
  add.optional_text("--pooling", flags.pooling, "the variant's",
                    "Of scores over a KV head's queries: " + names_of(poolings));
  add.optional_text("--selection", flags.selection, "the variant's",
                    "Selection: " + names_of(selections) + ", which takes up to --k");
  add.optional_text("--pinning", flags.pinning, "the variant's",
                    "Units selected whatever their scores, besides --k: " + names_of(pinnings));
  number_of_variants("--pinned", &method_spec::pinned, "pin_outliers: units of a KV head");
  add.optional_text("--rows", flags.rows, "the variant's",
                    "Who shares one selection: " + names_of(selection_scopes));
  add.parsed(
         "--unit", [&](const std::string& text) { flags.unit = whole("--unit", text); },
         "Tokens that are summarised, selected and recalled together, a divisor of the page; 0 for whole "
         "pages")
      ->type_name("INT")
      ->default_str("0, of infinigen 1, of shadowkv 8, of mpcache 16");
  add.parsed(
         "--thin", [&](const std::string& text) { flags.thin = finite("--thin", text); },
         "Share of the prompt's tokens that each KV head keeps, sink and window too, by its last " +
             std::to_string(rows_that_thin) + " rows' votes; errors and mass are to attention over all of it")
      ->type_name("FLOAT")
      ->default_str("1, of mpcache 0.3");
  add.parsed(
         "--top-p", [&](const std::string& text) { flags.top_p = finite("--top-p", text); },
         "top_p: share of the mass that is selected")
      ->type_name("FLOAT")
      ->default_str("0.95, of twilight 0.85, of freekv_calibrated_top_p 0.9");
  add.flag("--calibrated", flags.calibrated,
           "top_p: by temperatures, one for each KV head, found from the prompt's last 16 rows");
  add.parsed(
         "--bonus", [&](const std::string& text) { flags.bonus = finite("--bonus", text); },
         "sticky_top_k: what units that are held have more when the next step's are selected, in nats")
      ->type_name("FLOAT")
      ->default_str("0.693, twice the mass");
  add.optional_text("--correction", flags.correction, "the variant's",
                    "Correction: " + names_of(corrections));
  add.text("--drift-pool", numbers.drift_pool,
           "cosine_drift: of the queries' cosines, " + names_of(drift_pools));
  add.parsed(
         "--delta", [&](const std::string& text) { flags.delta = finite("--delta", text); },
         "Correct a KV head that lacks this share, mass_deficit: of the best pages' mass, missing_share: of "
         "its attention; verified_share: how probable it is that one stays that misses --epsilon")
      ->type_name("FLOAT")
      ->default_str("0.2, of missing_share and verified_share 0.05");
  add.parsed(
         "--epsilon", [&](const std::string& text) { flags.epsilon = finite("--epsilon", text); },
         "verified_share: correct a KV head unless it misses at most this share of its attention")
      ->type_name("FLOAT")
      ->default_str("0.1");
  number_of_variants("--samples", &method_spec::samples,
                     "verified_share: candidates that are drawn, 2 to 64");
  add.flag("--partial", numbers.partial,
           "mass_deficit, missing_share: exchange pages one by one until the deficit is closed");
  number_of_variants("--every", &method_spec::every, "every_n_steps: steps from one correction to the next");
  add.optional_text(
      "--heads", o.heads, "every head retrieves",
      "Head list: what each KV head keeps, see below, or for compress_kv which query heads choose, lines "
      "\"layer query_head\"; a trace names its layer in its metadata");
  add.optional_text(
      "--by-layer", o.by_layer, "all layers alike",
      "File of layers' own budgets and thresholds, lines \"layer tokens tau delta\" with - for what a layer "
      "has not: instead of --k, --tau and --delta; a trace names its layer in its metadata");
  add.text("--residency", numbers.residency,
           "Who leaves its slot first where some are spare: " + names_of(residencies));
  number_of_variants("--spare", &method_spec::spare, "Slots of each KV head beyond --k, resident route");
  add.text("--layout", o.layout, "Of the slots, resident route: " + names_of(layouts));
  add.text("--route", o.route, "resident (recall into slots) or in_place (attend from the store)");
  add.optional_text("--codec", flags.codec, "the variant's",
                    "How the store keeps complete pages: " + names_of(codecs));
  number_of_variants(
      "--key-rank", &method_spec::key_rank,
      "low_rank_keys: coefficients of a token's keys of all heads; at most as many as numbers; "
      "0: ShadowKV's share of them, 160 of 1024");
  add.parsed(
         "--pruned", [&](const std::string& text) { flags.pruned = finite("--pruned", text); },
         "key_channels: share of a key's channels that is not kept; which they are is chosen by the prompt's "
         "keys and the queries of its last 32 rows")
      ->type_name("FLOAT")
      ->default_str("0.4");
  add.parsed(
         "--rope-base",
         [&](const std::string& text) {
           o.rope_base = finite("--rope-base", text);
           if (*o.rope_base <= 0)
             refuse("--rope-base " + shortened(text) + " is not above 0; give the model's, such as 10000");
         },
         "low_rank_keys: of the model's rotary embedding; else the metadata's rope_base, or found from k_pre")
      ->type_name("FLOAT")
      ->default_str("the trace's");
  add.optional_text("--rope-pairs", o.rope_pairs, "the trace's",
                    "low_rank_keys, and fasa's basis: numbers of a key that are turned together, " +
                        names_of(rope_pairs) + "; GGUF files of Llama's family have neighbours");
  add.optional_text("--store-file", o.store_file, "the store is in memory",
                    "File that keeps complete pages, or a folder for one without a name in it");
  add.text("--dtype", o.dtype, "Round q, k and v to f32, f16 or bf16; stored: as in the trace");
  add.parsed(
         "--scale", [&](const std::string& text) { o.scale = positive_float_or_zero("--scale", text); },
         "Of scores and attention; 0 for the default")
      ->type_name("FLOAT")
      ->default_str("the metadata's scale, or 1/sqrt(head_dim)");
  add.parsed(
         "--selection-scale",
         [&](const std::string& text) {
           o.selection_scale = positive_float_or_zero("--selection-scale", text);
         },
         "Of the scores that pages are selected by; 1: their softmax is that of products not scaled")
      ->type_name("FLOAT")
      ->default_str("--scale");
  add.parsed(
         "--soft-cap",
         [&](const std::string& text) { o.soft_cap = positive_float_or_zero("--soft-cap", text); },
         "Attention's scores become cap * tanh(score / cap); 0 for none")
      ->type_name("FLOAT")
      ->default_str("0");
  add.text("--backend", o.backend,
           "host, or cuda: on a device, where FREEKV_CUDA was on and the policies are compiled for devices");
  add.whole_number("--threads", o.threads, "Threads that attend on the host, 1 to 1024");
  add.optional_text("--events", o.events, "none",
                    "Instead of a trace: a file of what happens to several sequences, see below");
  const auto optional_number = [&](const char* name, std::optional<int>& value, const char* otherwise,
                                   const char* help) {
    add.parsed(
           name, [name, &value](const std::string& text) { value = whole(name, text); }, help)
        ->type_name("INT")
        ->default_str(otherwise);
  };
  optional_number("--sliding-window", o.sliding_window, "none",
                  "The model's layer attends to so many last tokens alone, whatever the variant");
  optional_number("--store-pages", o.store_pages, "enough",
                  "--events: pages of the store, of all sequences together");
  optional_number("--fast-pages", o.fast_pages, "enough",
                  "--events: pages of slots, of all resident sequences together");
  add.optional_text(
      "--out", o.out, "none",
      "safetensors file to write, see below; for a folder of traces, a folder for a file of each");
  app.footer(footer());
  if (!parsed(app, argc, argv)) return std::nullopt;
  if ((trace->count() == 0) == !o.events)
    refuse(o.events
               ? "--events takes the place of a trace; give one of the two"
               : "trace is required: name a recorded layer, a folder of them, or --events; --help lists all");
  if (o.events && chosen_method(o, flags, numbers).evicts())
    refuse("--variant " + o.variant +
           " forgets, and what --events may ask for is not to be had then; choose a variant that retrieves");
  if (!o.events && (o.store_pages || o.fast_pages)) refuse("--store-pages and --fast-pages are for --events");
  (void)find_by_name("--backend", named(backends), o.backend);
  (void)find_by_name("--route", named(routes), o.route);
  (void)find_by_name("--layout", layouts, o.layout);
  (void)find_by_name("--dtype", named(dtypes), o.dtype);
  if (o.k < 1) refuse("--k " + std::to_string(o.k) + " is below 1; select at least one page");
  o.method = chosen_method(o, flags, numbers);
  o.tau = flags.tau.value_or(decimal(o.method.tau));
  o.top_p = flags.top_p.value_or(decimal(o.method.top_p));
  o.bonus = flags.bonus.value_or(decimal(o.method.bonus));
  o.delta = flags.delta.value_or(decimal(o.method.delta));
  o.epsilon = flags.epsilon.value_or(decimal(o.method.epsilon));
  o.pruned = flags.pruned.value_or(decimal(o.method.pruned));
  o.thin = flags.thin.value_or(decimal(o.method.thin));
  return o;
}

}  // namespace freekv::examples

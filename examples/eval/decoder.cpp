#include "decoder.hpp"

namespace freekv::examples {

namespace {

int total_tokens(std::span<const prompted_text> texts) {
  return static_cast<int>(texts.size() * texts.front().tokens.size());
}

std::unique_ptr<pipeline> pipeline_for(job& j, const contender& c, std::span<const prompted_text> texts,
                                       const contender_decoder::options& how, host_backend& backend) {
  const prompted_text& first = texts.front();
  const auto more = static_cast<int>(first.after_prompt().size()) + how.rows;
  pipeline_options o = options_of(c, j.options().common, j.model().shape(), j.prompt(), more, how.in_place);
  o.max_sequences = static_cast<int>(texts.size());
  o.max_decode_rows = how.rows;
  return make_pipeline(o, backend);
}

std::vector<sequence_id> open_all(std::span<const prompted_text> texts, pipeline& p) {
  std::vector<sequence_id> sequences;
  for (const prompted_text& text : texts) sequences.push_back(text.prompt.open(p));
  return sequences;
}

}  // namespace

stock_decoder::stock_decoder(job& j, std::span<const prompted_text> texts)
    : engine_(j.model(), {.threads = j.options().common.threads,
                          .context = total_tokens(texts),
                          .sequences = static_cast<int>(texts.size()),
                          .unified = false}) {
  for (std::size_t i = 0; i < texts.size(); ++i)
    restore_stock(engine_, texts[i].prompt_tokens(), true, j.place(), j.progress(), static_cast<int>(i));
}

contender_decoder::contender_decoder(job& j, const contender& c, std::span<const prompted_text> texts,
                                     const options& how)
    : backend_({.threads = j.options().common.threads, .overlap = j.options().common.overlap}),
      pipeline_(pipeline_for(j, c, texts, how, backend_)),
      sequences_(open_all(texts, *pipeline_)),
      engine_(j.model(), {.threads = j.options().common.threads,
                          .context = static_cast<int>(texts.size()) * how.rows,
                          .rows = static_cast<int>(texts.size()) * how.rows,
                          .sequences = static_cast<int>(texts.size())}),
      attention_(*pipeline_, sequences_, j.model().shape(),
                 c.keeps_everything() ? 0 : j.options().common.complete_layers) {}

void contender_decoder::truncate(int position, int sequence) {
  engine_.truncate(position, sequence);
  pipeline_->truncate(sequences_[sequence], position);
}

}  // namespace freekv::examples

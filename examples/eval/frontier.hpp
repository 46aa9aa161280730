// What selection and correction cost, and what they keep: every summary in every stored form, every trigger
// and threshold of correction, beside full attention and the selection that knows the keys.
#pragma once

namespace freekv::examples {

class job;

/// Two parts. Summaries, selected with anew before each attention, by bytes: loss of hidden facts, recall of
/// the pages that truly have the most mass, mass kept. Corrections of --frontier-summary, by pages that
/// attention waits for: loss of hidden facts, output error. Both at the first of --needle-budgets.
void compare_frontier(job& j);

}  // namespace freekv::examples

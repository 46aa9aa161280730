// A line about where a program was when a signal killed it: a fault in its code or in llama.cpp's must not
// end an hour's run without a word.
#pragma once

#include <string_view>

namespace freekv::examples {

/// From now on SIGSEGV, SIGILL, SIGBUS, SIGFPE and SIGABRT write one line to stderr, "PROGRAM: SIGNAL while
/// STAGE: DETAIL; REMARK", before the program dies of the same signal as it would have. A program built with
/// a sanitizer is left its own reports.
void report_fatal_signals(std::string_view program);

/// Stage: what the program is at until the next call, such as "measuring needles". Forgets the detail. This
/// and the next allocate nothing and may be called by any thread; texts are cut at 240 bytes, the remark at
/// 1200.
void note_stage(std::string_view stage);
/// Detail: which method, length, file or step of the stage.
void note_detail(std::string_view detail);
/// Remark: where to look, or what to do, after a signal in this stage and later ones; empty: nothing.
void note_remark(std::string_view remark);

}  // namespace freekv::examples

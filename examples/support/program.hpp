// What the programs' main functions share.
#pragma once

#include <exception>
#include <iostream>
#include <new>
#include <stdexcept>
#include <string>

#include "cited.hpp"
#include "fatal_signals.hpp"
#include "temporary_files.hpp"

namespace freekv::examples {

/// Runs a program's body: 0, or 2 with one sentence on stderr if it throws. A fatal signal leaves a line too.
template <class Body>
int exit_code_of(const std::string& program, const Body& body) {
  report_fatal_signals(program);
  remove_temporary_files_on_signals();
  const auto failed = [&](std::string sentence) {
    sentence = shortened(sentence, 700, 250);  // what somebody else's sentence cites may be of any length
    for (char& c : sentence)  // names from files and arguments may hold line breaks and escape codes
      if (static_cast<unsigned char>(c) < 0x20 || c == 0x7f) c = ' ';
    std::cerr << program << ": " << sentence << std::endl;
    return 2;
  };
  const char* no_memory =
      "not enough memory for this many tokens and these settings; choose fewer tokens, selected pages or "
      "spare "
      "slots";
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return failed(no_memory);
  } catch (const std::length_error&) {
    return failed(no_memory);
  } catch (const std::exception& e) {
    return failed(e.what());
  }
}

}  // namespace freekv::examples

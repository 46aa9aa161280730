// What the programs' main functions share.
#pragma once

#include <exception>
#include <iostream>
#include <new>
#include <string>

namespace freekv::examples {

/// Runs a program's body: 0, or 2 with one sentence on stderr if it throws.
template <class Body>
int exit_code_of(const std::string& program, const Body& body) {
  const auto failed = [&](std::string sentence) {
    for (char& c : sentence)
      if (c == '\n') c = ' ';
    std::cerr << program << ": " << sentence << std::endl;
    return 2;
  };
  try {
    body();
    return 0;
  } catch (const std::bad_alloc&) {
    return failed("not enough memory for this many tokens and these settings; choose fewer");
  } catch (const std::exception& e) {
    return failed(e.what());
  }
}

}  // namespace freekv::examples

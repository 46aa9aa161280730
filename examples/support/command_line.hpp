// How the programs take their options.
#pragma once

#include <CLI/CLI.hpp>
#include <iostream>
#include <string>

#include "pipeline.hpp"

namespace freekv::examples {

/// Parses the arguments; false if they asked for help, which has been printed then. Throws choice_error.
inline bool parsed(CLI::App& app, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return true;
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return false;
  } catch (const CLI::ParseError& e) {
    throw choice_error(std::string(e.what()) + "; --help lists the options");
  }
}

}  // namespace freekv::examples

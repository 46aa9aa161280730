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

/// Checks that an option is a number from `least` to `most`; CLI::Range takes NaN.
inline CLI::Validator number_within(double least, double most) {
  const CLI::Range range(least, most);
  return {[=](std::string& text) {
            double number = 0;
            return CLI::detail::lexical_cast(text, number) && number == number ? range(text)
                                                                               : text + " is not a number";
          },
          range.get_description()};
}

}  // namespace freekv::examples

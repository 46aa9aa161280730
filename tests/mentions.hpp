// Messages say what they must.
#pragma once

#include <string>
#include <vector>

#include "catch.hpp"

namespace tests {

inline void check_mentions(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    INFO(message);
    INFO("lacks: " << part);
    CHECK(message.find(part) != std::string::npos);
  }
}

}  // namespace tests

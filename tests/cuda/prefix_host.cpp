#include "prefix_case.hpp"

namespace prefix_case {

of_host run_host(const input& in) {
  host_backend backend;
  side<host_backend> host(in, backend, {});
  return {host.save(), host.expected()};
}

std::vector<float> given_by_host(const input& in, const std::string& bytes) {
  host_backend backend;
  side<host_backend> host(in, backend, {});
  return host.given(bytes);
}

}  // namespace prefix_case

#include "scales_case.hpp"

namespace scales_case {

template <class Element, class Row>
std::vector<float> decoded(const rows_of_text<Row>& in) {
  using pipeline_type = pipeline_on<Element, host_backend>;
  host_backend backend;
  pipeline_type pipeline(settings_of<pipeline_type>(in), backend);
  std::vector<float> all = decode(pipeline, in);
  const std::vector<float> more = attend_prompt(pipeline, in);
  all.insert(all.end(), more.begin(), more.end());
  return all;
}

std::vector<float> of_host(const rows_of_text<half>& in, bool in_fp8) {
  return in_fp8 ? decoded<fp8_e4m3>(in) : decoded<half>(in);
}
std::vector<float> of_host(const rows_of_text<fp8_e4m3>& in) { return decoded<fp8_e4m3>(in); }

}  // namespace scales_case

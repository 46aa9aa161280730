// Which of the compiled device pipelines is the one that is wanted.
#include "device_pipeline.hpp"

#include <algorithm>
#include <iterator>

namespace freekv::examples {
namespace {

std::string text_of(const device_shape& shape) {
  return std::string(dtype_name(shape.element)) + " of head_dim " + std::to_string(shape.head_dim);
}

}  // namespace

std::unique_ptr<pipeline> make_device_pipeline(const pipeline_options& o) {
  std::string why;
  if (!device_is_there(why))
    throw choice_error("no NVIDIA device is usable: " + why + "; choose the host backend");
  const method_spec& m = o.method;
  if (m.evicts())
    throw choice_error("eviction " + m.eviction + " is not there for devices; choose the host backend");
  if (m.completes())
    throw choice_error("completion " + m.completion + " is not there for devices; choose the host backend");
  if (!o.store_file.empty())
    throw choice_error("devices keep no store in a file; leave it out, or choose the host backend");

  const method_spec published;
  const bool summary_as_published = m.summary == published.summary && m.format == published.format;
  const bool others_as_published = m.pooling == published.pooling && m.selection == published.selection &&
                                   m.correction == published.correction &&
                                   m.residency == published.residency && m.spare == published.spare &&
                                   m.rows == published.rows && m.pinning == published.pinning;
  const bool codec_as_published = m.codec == published.codec;
  const auto is = [&](const device_shape& shape) {
    return shape.element == o.element && shape.head_dim == o.head_dim;
  };
  if (is(policy_shape) && others_as_published && codec_as_published) return make_device_summaries(o);
  if (is(policy_shape) && others_as_published && summary_as_published) return make_device_codecs(o);
  if (is(policy_shape) && summary_as_published && codec_as_published) return make_device_policies(o);
  if (std::any_of(std::begin(device_shapes), std::end(device_shapes), is) && summary_as_published &&
      others_as_published && codec_as_published)
    return make_device_shapes(o);
  std::string shapes;
  for (const device_shape& shape : device_shapes) shapes += (shapes.empty() ? "" : ", ") + text_of(shape);
  throw choice_error(text_of({o.element, o.head_dim}) + " with " + m.summary + ", " + m.pooling + ", " +
                     m.selection + ", " + m.pinning + ", " + m.rows + ", " + m.correction + ", " +
                     m.residency + " and " + m.codec + " is not compiled for devices: there are " +
                     text_of(policy_shape) +
                     " with another summary, with another codec or with other policies than the published "
                     "ones, not two of these, and as published " +
                     shapes + "; choose among these, or the host backend");
}

}  // namespace freekv::examples

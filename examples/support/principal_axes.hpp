// The directions in which vectors vary most: what the bases and codebooks of keys are made of.
#pragma once

#include <span>
#include <vector>

namespace freekv::examples {

/// A mean, and the leading eigenvectors of the covariance about it.
struct principal_axes {
  std::vector<float> mean;        ///< (dim)
  std::vector<float> rows;        ///< (count, dim), orthonormal, in falling variance
  std::vector<double> variances;  ///< (count)
};

/// The `count` leading axes of vectors of `dim` floats that begin at `first`, `first + stride`, ... of
/// `floats`. Vectors with a NaN or an infinity are left out; with none at all the mean is 0 and the rows are
/// unit vectors.
principal_axes principal_axes_of(std::span<const float> floats, int first, int stride, int dim, int count);
/// The same about 0 instead of the mean: the leading right singular vectors of the vectors as a matrix's
/// rows.
principal_axes singular_axes_of(std::span<const float> floats, int dim, int count);
/// The leading axes and variances of a covariance (dim, dim), of which what is on and right of the diagonal
/// counts; the mean stays empty.
principal_axes axes_of_covariance(std::span<const double> covariance, int dim, int count);

}  // namespace freekv::examples

#include "principal_axes.hpp"

#include <Eigen/Eigenvalues>
#include <algorithm>
#include <freekv/core/size.hpp>

namespace freekv::examples {

namespace {

/// Rows and variances, by the lower triangle of a covariance.
principal_axes leading_axes(const Eigen::MatrixXd& covariance, int count) {
  const auto dim = static_cast<int>(covariance.rows());
  const Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver(covariance);  // eigenvalues ascend
  principal_axes axes;
  axes.rows.resize(to_size(count * dim));
  for (int r = 0; r < count; ++r) {
    Eigen::Map<Eigen::VectorXf>(axes.rows.data() + r * dim, dim) =
        solver.eigenvectors().col(dim - 1 - r).cast<float>();
    axes.variances.push_back(solver.eigenvalues()[dim - 1 - r]);
  }
  return axes;
}

principal_axes axes_of(std::span<const float> floats, int first, int stride, int dim, int count,
                       bool about_mean) {
  Eigen::VectorXd mean = Eigen::VectorXd::Zero(dim);
  Eigen::MatrixXd products = Eigen::MatrixXd::Zero(dim, dim);
  double vectors = 0;
  for (auto at = to_size(first); at < floats.size(); at += to_size(stride)) {
    const Eigen::VectorXd vector = Eigen::Map<const Eigen::VectorXf>(floats.data() + at, dim).cast<double>();
    if (!vector.allFinite()) continue;
    mean += vector;
    products.selfadjointView<Eigen::Lower>().rankUpdate(vector);
    ++vectors;
  }
  mean /= std::max(vectors, 1.0);
  products /= std::max(vectors, 1.0);
  if (!about_mean) mean.setZero();
  products.selfadjointView<Eigen::Lower>().rankUpdate(mean, -1.0);
  principal_axes axes = leading_axes(products, count);
  axes.mean.resize(to_size(dim));
  Eigen::Map<Eigen::VectorXf>(axes.mean.data(), dim) = mean.cast<float>();
  return axes;
}

}  // namespace

principal_axes principal_axes_of(std::span<const float> floats, int first, int stride, int dim, int count) {
  return axes_of(floats, first, stride, dim, count, true);
}

principal_axes singular_axes_of(std::span<const float> floats, int dim, int count) {
  return axes_of(floats, 0, dim, dim, count, false);
}

principal_axes axes_of_covariance(std::span<const double> covariance, int dim, int count) {
  return leading_axes(Eigen::Map<const Eigen::MatrixXd>(covariance.data(), dim, dim),
                      count);  // its transpose
}

}  // namespace freekv::examples

#include "text_file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>
#include <freekv/core/size.hpp>

#include <array>
#include <cerrno>
#include <system_error>

#include "cited.hpp"
#include "safetensors.hpp"

namespace freekv::examples {

std::string read_text_file(const std::filesystem::path& path, const std::string& remedy) {
  const auto fail = [&](const std::string& what) -> void {
    throw file_error(cited_path(path) + " " + what + "; " + remedy);
  };
  const auto cause = [](int number) { return std::generic_category().message(number); };
  if (path.native().find('\0') != std::string::npos) fail("is a file name with a zero byte");
  struct descriptor {
    int number;
    ~descriptor() {
      if (number >= 0) ::close(number);
    }
  };
  // O_NONBLOCK: opening a FIFO would wait for somebody to write to it. Reading from one then does.
  const descriptor file{::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY)};
  if (file.number < 0) fail("cannot be opened: " + cause(errno));
  struct stat status {};
  if (::fstat(file.number, &status) != 0) fail("cannot be examined: " + cause(errno));
  if (S_ISDIR(status.st_mode)) fail("is a directory");
  if (::fcntl(file.number, F_SETFL, 0) != 0) fail("cannot be read: " + cause(errno));
  std::string text;
  std::array<char, 1 << 16> block;
  for (;;) {
    const ssize_t count = ::read(file.number, block.data(), block.size());
    if (count == 0) break;
    if (count > 0)
      text.append(block.data(), to_size(count));
    else if (errno != EINTR)
      fail("cannot be read: " + cause(errno));
  }
  if (S_ISFIFO(status.st_mode) && text.empty()) fail("is a FIFO that nobody writes to");
  return text;
}

}  // namespace freekv::examples

// RocksDB's own log.

#include <fcntl.h>
#include <sys/time.h>
#include <unistd.h>

#include <algorithm>
#include <cstdarg>
#include <cstdio>
#include <ctime>

#include "native_internal.h"
#include "rocksdb/env.h"

namespace keelstate {

// Log writes the file LOG, as RocksDB would by itself, and drops what the disk does
// not take. RocksDB's own logger is one of the files that it writes with care: once
// a line has met the end of the disk the next one ends the process, if the library
// has its assertions. It flushes every 10 seconds, so that 10 seconds of a full disk
// and one line more were enough.
class Log : public rocksdb::Logger {
 public:
  explicit Log(const std::string& dir)
      : Logger(rocksdb::WARN_LEVEL), path_(dir + "/LOG"), old_(dir + "/LOG.old.1") {
    std::rename(path_.c_str(), old_.c_str());
  }
  ~Log() override { Shut(); }

  using rocksdb::Logger::Logv;
  void Logv(const char* format, va_list ap) override {
    char line[4096];
    size_t n = Stamp(line, sizeof(line));
    const int m = vsnprintf(line + n, sizeof(line) - n, format, ap);
    if (m < 0) return;
    n = std::min(n + static_cast<size_t>(m), sizeof(line) - 1);
    if (line[n - 1] != '\n') line[n++] = '\n';  // in place of the zero byte
    std::lock_guard<std::mutex> lock(mu_);
    if (size_ >= kMaxBytes) Roll();
    if (fd_ < 0) Open();
    if (fd_ < 0) return;
    const ssize_t written = write(fd_, line, n);
    if (written > 0) size_ += static_cast<size_t>(written);
  }
  // The options that a database runs with are worth their lines at every level.
  void LogHeader(const char* format, va_list ap) override { Logv(format, ap); }
  size_t GetLogFileSize() const override {
    std::lock_guard<std::mutex> lock(mu_);
    return size_;
  }

 private:
  static constexpr size_t kMaxBytes = 1 << 20;

  static size_t Stamp(char* line, size_t size) {
    struct timeval now;
    struct tm t;
    gettimeofday(&now, nullptr);
    localtime_r(&now.tv_sec, &t);
    return static_cast<size_t>(snprintf(line, size, "%04d/%02d/%02d-%02d:%02d:%02d.%06d ", t.tm_year + 1900,
                                        t.tm_mon + 1, t.tm_mday, t.tm_hour, t.tm_min, t.tm_sec,
                                        static_cast<int>(now.tv_usec)));
  }

  void Open() { fd_ = open(path_.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644); }

  void Shut() {
    if (fd_ >= 0) close(fd_);
    fd_ = -1;
    size_ = 0;
  }

  void Roll() {
    Shut();
    std::rename(path_.c_str(), old_.c_str());
  }

  const std::string path_, old_;
  mutable std::mutex mu_;
  int fd_ = -1;
  size_t size_ = 0;
};

std::shared_ptr<rocksdb::Logger> NewLog(const std::string& dir) { return std::make_shared<Log>(dir); }

}  // namespace keelstate

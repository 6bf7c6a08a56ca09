// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COLLECTIVE_TRANSPORT_H_
#define TFDIST_CUSTOM_OPS_COLLECTIVE_TRANSPORT_H_

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "custom_ops/collective/control_link.h"
#include "custom_ops/collective/data_link.h"
#include "custom_ops/collective/scratch.h"
#include "custom_ops/collective/shared_rings.h"

namespace tfdist {

// What a transport tells, on its own thread and with no lock held.
class TransportListener {
 public:
  virtual ~TransportListener() = default;
  virtual void OnControl(int peer, ControlFrame& frame) = 0;
  // Once per peer; nothing comes from it afterwards. `why` is empty where its
  // connections have ended, and says what it has sent if that makes no sense.
  virtual void OnLost(int peer, const std::string& why) = 0;
  // Every `kTick` since anybody has asked for it, until it returns false.
  virtual bool OnTick() = 0;
};

// A peer's connections cannot be used.
class BadConnection : public std::runtime_error {
 public:
  BadConnection(int peer, const std::string& why)
      : std::runtime_error(why), peer(peer) {}
  const int peer;
};

// The connections to all peers, and the one thread that serves them.
//
// Nothing is global, and nothing listens: sockets come connected, from whoever
// has made sure of who is at the other end.
class Transport {
 public:
  struct Pair {
    FileDescriptor data, control;  // none at this rank's own place
    SharedRings::Files shared;     // none where there is no `memory`
  };
  static constexpr int kTickMilliseconds = 50;

  // `most_early` is of each Inbox. Throws BadConnection and std::system_error.
  Transport(std::vector<Pair> sockets, double timeout, ScratchPool& scratch,
            uint64_t most_early);
  ~Transport();

  // Begins to listen. `listener` must outlive Stop. Throws std::system_error.
  void Start(TransportListener* listener);
  // Ends the thread; what was not sent is lost. Not on the thread itself.
  void Stop();
  // In a forked process, where the thread is not: closes what is open there.
  void CloseInChild();

  Inbox& inbox(int peer) { return links_[peer]->data.inbox(); }
  // Throw ConnectionLost; see DataLink and ControlLink.
  void Send(int peer, Outgoing* message);
  bool TakeBack(int peer, Outgoing* message, bool broken);
  void SendControl(int peer, const ControlFrame& frame);
  // When anything came from a peer last, and when bytes of messages moved.
  int64_t last_heard(int peer) const;
  int64_t last_moved(int peer) const { return links_[peer]->data.last_moved(); }
  // Whether bytes of messages are on their way to any peer's system.
  bool InFlight() const;
  // How often messages left for any peer, one or many together.
  int64_t writes() const;
  // Has OnTick called from now on.
  void Tick();

 private:
  struct Link {
    Link(Socket data, Socket control, std::unique_ptr<SharedRings> rings,
         ScratchPool& scratch, uint64_t most_early)
        : data(std::move(data), std::move(rings), scratch, most_early),
          control(std::move(control)) {}
    DataLink data;
    ControlLink control;
    // Of the transport's thread: lost, or when the connection for messages has
    // ended. The other may still tell why.
    bool lost = false;
    int64_t data_ended = 0;
    // Memory may hold more than was read in one turn.
    bool more = false;
  };

  void Loop();
  // What is watched of a peer.
  enum class Source : uint64_t { kData, kControl, kBell };
  static uint64_t TagOf(int peer, Source source);

  void Serve(int peer, Source source, uint32_t events);
  void ReadData(int peer, Source source);
  bool ReadControl(int peer);
  void WriteMore(int peer, Source source);
  void ReadMore();
  void LoseWhoIsSilent();
  void Lose(int peer, const std::string& why);
  void Watch(int fd, uint64_t tag, uint32_t events, bool anew);
  void Wake();

  std::vector<std::unique_ptr<Link>> links_;
  FileDescriptor poller_, wake_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> ticking_{false};
  // Of the thread: a connection has ended, or holds more; see Link.
  bool ending_ = false;
  bool more_ = false;
  TransportListener* listener_ = nullptr;
  std::thread thread_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COLLECTIVE_TRANSPORT_H_

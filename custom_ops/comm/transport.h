// SPDX-License-Identifier: Apache-2.0
#ifndef TFDIST_CUSTOM_OPS_COMM_TRANSPORT_H_
#define TFDIST_CUSTOM_OPS_COMM_TRANSPORT_H_

#include <atomic>
#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "custom_ops/comm/control_link.h"
#include "custom_ops/comm/data_link.h"
#include "custom_ops/comm/scratch.h"
#include "custom_ops/comm/shared_rings.h"

namespace tfdist {

// Receives the events of a transport, on the transport's thread and with no
// lock held.
class TransportListener {
 public:
  virtual ~TransportListener() = default;
  virtual void OnControl(int peer, ControlFrame& frame) = 0;
  // Called once per peer; nothing arrives from the peer afterwards. `why` is
  // empty if the connections have ended. Otherwise it describes the invalid
  // data that the peer has sent.
  virtual void OnLost(int peer, const std::string& why) = 0;
  // Called every kTickMilliseconds after Tick(), until it returns false.
  virtual bool OnTick() = 0;
};

// The connections of a peer cannot be used.
class BadConnection : public std::runtime_error {
 public:
  BadConnection(int peer, const std::string& why)
      : std::runtime_error(why), peer(peer) {}
  const int peer;
};

// The connections to all peers, and the one thread that serves them.
//
// This class has no global state and does not listen. The caller passes
// connected sockets and has already authenticated the peers.
class Transport {
 public:
  struct Pair {
    FileDescriptor data, control;  // not open for this rank itself
    SharedRings::Files shared;     // not open without shared memory
  };
  static constexpr int kTickMilliseconds = 50;

  // `most_early` is the limit of each Inbox. Throws BadConnection and
  // std::system_error.
  Transport(std::vector<Pair> sockets, double timeout, ScratchPool& scratch,
            uint64_t most_early);
  ~Transport();

  // Starts the thread. `listener` must outlive Stop. Throws std::system_error.
  void Start(TransportListener* listener);
  // Ends the thread; messages that are not sent are lost. Must not be called on
  // the thread itself.
  void Stop();
  // Closes the copies of the connections in a forked process, which does not
  // have the thread.
  void CloseInChild();

  Inbox& inbox(int peer) { return links_[peer]->data.inbox(); }
  // These functions throw ConnectionLost; see DataLink and ControlLink.
  void Send(int peer, Outgoing* message);
  bool Withdraw(int peer, Outgoing* message, bool broken);
  void SendControl(int peer, const ControlFrame& frame);
  // When anything last arrived from a peer, and when message bytes last moved.
  int64_t last_heard(int peer) const;
  int64_t last_moved(int peer) const { return links_[peer]->data.last_moved(); }
  // Whether the system of any peer has not yet acknowledged bytes of messages.
  bool InFlight() const;
  // Number of writes to all peers. One write may send several messages.
  int64_t writes() const;
  // Starts the calls of OnTick.
  void Tick();

 private:
  struct Link {
    Link(Socket data, Socket control, std::unique_ptr<SharedRings> rings,
         ScratchPool& scratch, uint64_t most_early)
        : data(std::move(data), std::move(rings), scratch, most_early),
          control(std::move(control)) {}
    DataLink data;
    ControlLink control;
    // Used by the transport's thread. `data_ended` is the time when the
    // connection for messages ended; the control connection may still deliver
    // the reason.
    bool lost = false;
    int64_t data_ended = 0;
    // Memory may hold more than one call of OnReadable has read.
    bool more = false;
  };

  void Loop();
  // What the thread watches of a peer.
  enum class Source : uint64_t { kData, kControl, kBell };
  static uint64_t TagOf(int peer, Source source);

  void Serve(int peer, Source source, uint32_t events);
  void ReadData(int peer, Source source);
  bool ReadControl(int peer);
  void WriteMore(int peer, Source source);
  void ReadMore();
  void DropEndedPeers();
  bool LimitPauses();
  void ReportLost(int peer, const std::string& why);
  void Watch(int fd, uint64_t tag, uint32_t events, bool anew);
  void Wake();

  std::vector<std::unique_ptr<Link>> links_;
  FileDescriptor poller_, wake_;
  std::atomic<bool> stopping_{false};
  std::atomic<bool> ticking_{false};
  // Used by the thread. Whether any connection has ended, or any may hold more
  // data; see Link.
  bool ending_ = false;
  bool more_ = false;
  TransportListener* listener_ = nullptr;
  std::thread thread_;
};

}  // namespace tfdist

#endif  // TFDIST_CUSTOM_OPS_COMM_TRANSPORT_H_

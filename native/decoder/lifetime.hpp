// Nothing outlives its owner: the decoder ends when its parent dies, when standard input is closed, or on SIGTERM, at any
// moment, also within a long computation or while a model loads.
#pragma once

namespace ringfence {

// Call first thing in main(). SIGTERM gets its default action back (there is no state to save, so dying at once is the
// promptest and safest answer), SIGPIPE is ignored (Output sees EPIPE), and the kernel is told to kill us with our parent.
void bind_to_parent();

// Watches for the other end of standard input to close. The step loop sees the end of file itself; this thread ends the
// process when the loop has not done so within `grace_ms`, because it is inside a computation.
void watch_stdin(int grace_ms);

}  // namespace ringfence

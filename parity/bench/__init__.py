"""Speed: the reference beside a peer, and the kernels beside what their bytes and products allow."""

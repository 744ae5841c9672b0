"""Other instances found by settings, mDNS and DNS."""

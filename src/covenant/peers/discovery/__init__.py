"""Finding other instances: by settings, on the local network, in DNS. All of it gives candidates, never peers."""

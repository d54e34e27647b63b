"""What all faces of the servers stand on: listening sockets, and the switches that make them misbehave."""

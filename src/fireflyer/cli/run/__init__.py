"""`fireflyer run`, and the verbs that follow and steer a task."""

"""Starting, finding and ending the service on Ray. The only package that imports Ray."""

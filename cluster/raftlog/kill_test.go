package raftlog

func killChild(string) {}

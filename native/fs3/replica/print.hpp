// Events and actions as text, for transcripts.
#pragma once

#include <string>

#include "fs3/replica/actions.hpp"

namespace ff::fs3::replica {

const char* name(State state);
const char* name(Local local);
const char* name(Kind kind);
const char* name(Status status);

std::string to_string(const ChunkId& chunk);
std::string to_string(const Event& event);
std::string to_string(const Message& message);
std::string to_string(const Action& action);

}  // namespace ff::fs3::replica

-- Replaces one writer's note under a topic if nobody has written there since a version was read; else tells the notes.
-- KEYS: the topic, a hash of notes ("until_ms body") by writer, with how often it was written under "".
-- ARGV: the version that was read, the writer, "" or the body, lease_ms, the longest lease_ms, most_bytes of a note.
-- Returns nothing (false) if the note was written, else the version, now_ms, and writer and note by turns.
local time = redis.call('TIME')
local now_ms = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local version = redis.call('HGET', KEYS[1], '') or '0'
if version == ARGV[1] then
  if ARGV[3] == '' then
    if redis.call('HDEL', KEYS[1], ARGV[2]) == 0 then
      return false
    end
  else
    redis.call('HSET', KEYS[1], ARGV[2], string.format('%.0f ', now_ms + tonumber(ARGV[4])) .. ARGV[3])
  end
  redis.call('HINCRBY', KEYS[1], '', 1)
  -- The version outlives the notes, so that nobody takes a new beginning for the old one.
  redis.call('PEXPIRE', KEYS[1], 2 * tonumber(ARGV[5]))
  return false
end
local found = {version, string.format('%.0f', now_ms)}
for _, writer in ipairs(redis.call('HKEYS', KEYS[1])) do
  if writer ~= '' then
    local note = redis.call('HSTRLEN', KEYS[1], writer) <= tonumber(ARGV[6]) and redis.call('HGET', KEYS[1], writer)
    local until_ms = note and tonumber(string.match(note, '^(%d+) ') or nil)
    if until_ms and now_ms < until_ms and until_ms <= now_ms + tonumber(ARGV[5]) then
      found[#found + 1] = writer
      found[#found + 1] = note
    else
      -- Nobody counts on it, or nobody here has written it: the version stays.
      redis.pcall('HDEL', KEYS[1], writer)
    end
  end
end
return found

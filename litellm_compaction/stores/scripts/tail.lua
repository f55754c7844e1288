-- Returns the lowest number it looked at (False at the end), then number, when_s, body of the lines that match, newest
-- first.
-- KEYS: the stream. ARGV: the highest and the lowest number to look at, how many to look at, since_s, characters.
local lines = redis.call('XREVRANGE', KEYS[1], ARGV[1], ARGV[2], 'COUNT', ARGV[3])
local found = {false}
if #lines == tonumber(ARGV[3]) then
  found[1] = lines[#lines][1]
end
for _, line in ipairs(lines) do
  local when_s, body = line[2][2], line[2][4]
  if tonumber(when_s) >= tonumber(ARGV[4]) and string.find(body, ARGV[5], 1, true) then
    found[#found + 1] = line[1]
    found[#found + 1] = when_s
    found[#found + 1] = body
  end
end
return found
